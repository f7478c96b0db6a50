"""Where the processes of a run meet: addresses, ports, and who listens there."""

import os
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from dsframe.cluster import process_group, world
from dsframe.cluster.agreement import assert_engines_agree, differences
from dsframe.cluster.rendezvous import bound_to, free_port, interface_to, listener, meeting_point
from dsframe.cluster.world import PORTS, World
from dsframe.errors import WorldError
from tests.threads import Room
from tests.unit.test_world import ENVIRONMENTS


def test_meeting_points():
    assert meeting_point(world.read(ENVIRONMENTS["deepspeed"]), {}) == ("node1", 29511)
    steps = [
        ENVIRONMENTS["srun"] | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job, step in (("17", "1"), ("18", "0"))
    ]
    (first, port), (second, other) = (meeting_point(world.read(step), {}) for step in steps)
    assert first == second == "node1"
    assert port != other, "steps that share a host"
    assert {port, other} < set(PORTS)
    assert meeting_point(World(), {})[0] == "127.0.0.1"
    one_host, job = World(0, 2, 0, 2, 0, "mpirun"), {"OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "job1"}
    assert meeting_point(one_host, job) == meeting_point(one_host, job)
    assert meeting_point(one_host, job) != meeting_point(one_host, {**job, "PMIX_NAMESPACE": "job2"})
    assert meeting_point(replace(one_host, master_address="node7"), job) == meeting_point(one_host, job)
    with pytest.raises(WorldError, match="set MASTER_ADDR"):
        meeting_point(world.read(ENVIRONMENTS["mpirun"]), ENVIRONMENTS["mpirun"])
    # MPICH's simple PMI: the variables of one process name nothing that the others know as well.
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_ID": "1"}
    with pytest.raises(WorldError, match="set MASTER_PORT"):
        meeting_point(world.read(hydra), hydra)
    hydra["MASTER_PORT"] = "29511"
    assert meeting_point(world.read(hydra), hydra) == ("127.0.0.1", 29511)


def test_ranks_compare_values_in_any_order():
    def refused(ranks):
        rank = ranks.plan.world.rank
        assert_engines_agree(ranks, {"a": "1", "b": "2"} if rank else {"b": "2", "a": "1"})
        with pytest.raises(WorldError, match="a is 1 on rank 1 and 0 on rank 0"):
            assert_engines_agree(ranks, {"a": str(rank)})
        return True

    assert Room(2).run(refused) == [True] * 2


def test_of_ranks_that_differ_five_differences_are_told():
    lines = differences([dict.fromkeys("abcdefg", "1"), {"h": "2"}])
    assert lines[0] == "a is not there on rank 1 and 1 on rank 0"
    assert lines[5:] == ["3 more"]


def _has_ipv6():
    """Whether this machine's loopback speaks it; containers often do not."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_free_port_is_none_that_the_system_gives_to_connections():
    """A launcher listens seconds later: the kill test lost a restart to a connection that had got the port."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < free_port() < min(first, 32_768) for _ in range(50))


def test_a_meeting_is_nobodys_but_those_who_meet(monkeypatch):
    """On one host it listens on the loopback alone, over several on the one address that the others are told."""
    port = free_port()
    with monkeypatch.context() as patch:
        patch.setattr(process_group, "meeting_point", lambda world: (socket.gethostname(), port))
        process_group.rendezvous_address.cache_clear()
        place = process_group.rendezvous_address(World(0, 2, 0, 2))
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun listens, where it says
        process_group.rendezvous_address.cache_clear()
        assert process_group.rendezvous_address(World(0, 2, 0, 2)) == (socket.gethostname(), port)
    process_group.rendezvous_address.cache_clear()
    assert place == ("127.0.0.1", port)
    store = process_group._store(*place, 1, True, timedelta(seconds=9))
    listening = {entry.laddr for entry in psutil.Process().net_connections() if entry.status == psutil.CONN_LISTEN}
    assert {entry.ip for entry in listening if entry.port == port} == {"127.0.0.1"}
    store.set("there", "yes")
    with (
        pytest.raises(WorldError, match=f"port {port} on 127.0.0.1 is in use"),
        process_group.explained(World(), *place),
    ):
        listener(*place)
    second = free_port()
    listening = listener("127.0.0.1", second)  # before anybody is waited for there
    with pytest.raises(OSError, match="in use"):
        listener("127.0.0.1", second)
    listening.close()
    # What is not known to be this host's in IPv4 is torch's own to listen at, everywhere.
    assert listener("::1", port) is None
    port = free_port()
    store = process_group._store("::1" if _has_ipv6() else "127.0.0.2", port, 1, True, timedelta(seconds=9))
    store.set("there", "yes")
    assert store.get("there") == b"yes"
    own = [("127.0.0.1", "lo"), ("127.0.1.1", "lo"), ("10.0.0.5", "eth0")]
    monkeypatch.setattr("dsframe.cluster.rendezvous.addresses", lambda: iter(own))
    names = {"node1": "10.0.0.5", "debian": "127.0.1.1", "elsewhere": "10.9.9.9", "localhost": "127.0.0.1"}
    monkeypatch.setattr("socket.gethostbyname", lambda name: names[name])
    assert [bound_to(name) for name in names] == ["10.0.0.5", "", "", "127.0.0.1"]
    assert interface_to("127.0.0.1") is None, "no other host is reached by the loopback"


STORED = {}


class _KeyValueStore(BaseHTTPRequestHandler):
    """As horovodrun serves it: 404 for what nobody has put."""

    def do_PUT(self):
        STORED[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def do_GET(self):
        self.send_response(200 if self.path in STORED else 404)
        self.end_headers()
        self.wfile.write(STORED.get(self.path, b""))

    def log_message(self, *_): ...


@pytest.mark.parametrize(("local_size", "host"), [(2, "127.0.0.1"), (1, "node1")])
def test_horovods_ranks_meet_where_rank_0_says(local_size, host):
    """Also if another asks before."""
    STORED.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _KeyValueStore)
    threading.Thread(target=server.serve_forever).start()
    environ = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port),
        "HOROVOD_HOSTNAME": "node1",
    }
    found = {}

    def meet(rank):
        found[rank] = meeting_point(World(rank, 2, 0, local_size, launcher="horovodrun"), environ)

    try:
        threads = [threading.Thread(target=meet, args=(rank,)) for rank in (1, 0)]
        for thread in threads:
            thread.start()
            thread.join(0.2)
        for thread in threads:
            thread.join(20)
    finally:
        server.shutdown()
        server.server_close()
    assert found[0] == found[1]
    assert found[0][0] == host
    assert found[0][1] in PORTS


@pytest.mark.parametrize(("agent", "attempt"), [("True", "3"), ("False", "0")])
def test_a_restart_has_a_place_of_its_own_where_the_launcher_keeps_the_store(agent, attempt, monkeypatch):
    """Where it keeps none, a node that joins later counts its restarts from 0."""
    served = []
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    monkeypatch.setattr(process_group, "_store", lambda *given: served.append(given[3]) or store)
    monkeypatch.setattr(process_group, "_meetings", iter([5]))
    process_group.meet(World(), "127.0.0.1", 1).set("there", "yes")
    assert store.check([f"dsframe/{attempt}/5/there"])
    assert served == [agent != "True"]


@pytest.mark.parametrize(("hosts", "expected"), [(1, "lo"), (2, "eth0")])
def test_gloo_takes_the_interface_that_leads_to_rank_0(hosts, expected, monkeypatch):
    for name in ("interface_to", "meet", "PrefixStore"):
        monkeypatch.setattr(process_group, name, lambda *_: "eth0")
    monkeypatch.setattr(process_group, "rendezvous_address", lambda _: ("10.0.0.5", 1))
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, **__: None)
    with mock.patch.dict(os.environ):  # it writes what libraries read
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        process_group.open_process_group(World(0, 2, 0, 2 // hosts), torch.device("cpu"))
        assert os.environ["GLOO_SOCKET_IFNAME"] == expected

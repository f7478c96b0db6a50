"""Strangers on the network: garbage and half-open connections at a run's ports, a process that speaks to its store, a cut link."""

import contextlib
import shutil
import socket
import threading
import time

import psutil

from tests.attack.arena import UntriedError, goes_on, held, needs_root, told, train, whole, write
from tests.cluster.network import NODES, Network
from tests.processes import free_port, run_ranks


def _ports(running):
    found = set()
    for process in running.processes():
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip.replace("::", "127.0.0.1"), connection.laddr.port))
    return {(ip if ip != "0.0.0.0" else "127.0.0.1", port) for ip, port in found}


def _connected(place):
    with contextlib.suppress(OSError):
        return socket.create_connection(place, timeout=1)
    return None


def _strangers(chance, kind, when):
    """A function for ``during``: comes to every port of the run, ``kind`` of visit, at the start or while it trains."""
    visited = []

    def come(running):
        if when == "while it trains":
            running.wait_for(lambda: "step-00000004" in running.output, timeout_seconds=60, what="a save")
        else:
            running.wait_for(lambda: _ports(running), timeout_seconds=60, what="a port")
        open_ones = []
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            for place in _ports(running):
                connection = _connected(place)
                if connection is None:
                    continue
                visited.append(place[1])
                with contextlib.suppress(OSError):
                    if kind == "garbage":
                        connection.sendall(chance.randbytes(chance.choice([1, 7, 64, 5000])))
                        connection.close()
                    elif kind == "half a message":
                        connection.sendall(bytes(3))
                open_ones.append(connection)
            time.sleep(0.1)
        if kind != "half-open":
            for connection in open_ones:
                connection.close()
        else:
            threading.Timer(20, lambda: [one.close() for one in open_ones]).start()

    return visited, come


def _visited(folder, chance, kind):
    when = chance.choice(["at the start", "while it trains"])
    visited, come = _strangers(chance, kind, when)
    finished = train(folder, ranks=2, during=come, env={"STEP_SECONDS": "0.1"}, seconds=150)
    if finished.returncode:
        held("Traceback" not in finished.output, "a traceback instead of a line", finished)
        goes_on(folder, 2)
    else:
        whole(folder, 2)
    return f"{kind} at {len(set(visited))} ports {when}, {len(visited)} connections: exit code {finished.returncode}"


def garbage(folder, chance):
    """Bytes that mean nothing to who listens there."""
    return _visited(folder, chance, "garbage")


def half_open(folder, chance):
    """Connections that say nothing and stay, or say half a message."""
    return _visited(folder, chance, chance.choice(["half-open", "half a message"]))


def stranger(folder, chance):
    """A process that speaks the store's language takes keys away and writes others: docs/security.md says what it can do."""
    from torch.distributed import TCPStore

    taken = []

    def come(running):
        running.wait_for(lambda: "step-00000004" in running.output, timeout_seconds=60, what="a save")
        port = next(
            int(value)
            for one in running.ranks().values()
            for name, value in one.environ().items()
            if name == "MASTER_PORT"
        )
        with contextlib.suppress(RuntimeError):
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            for key in store.list_keys():
                if chance.random() < 0.5:
                    taken.append(key)
                    store.delete_key(key) if chance.random() < 0.5 else store.set(key, chance.randbytes(20))

    finished = train(folder, ranks=2, during=come, env={"STEP_SECONDS": "0.1"}, seconds=150)
    if finished.returncode:
        goes_on(folder, 2)
    else:
        whole(folder, 2)
    return f"{len(taken)} keys of the store altered while it trains: exit code {finished.returncode}"


def loopback(folder, chance):
    """What a run on one host opens cannot be reached from another: every listening address is the loopback's."""
    found = []

    def look(running):
        running.wait_for(lambda: "step-00000004" in running.output, timeout_seconds=60, what="a save")
        for process in running.processes():
            with contextlib.suppress(psutil.Error):
                listening = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
                found.extend(f"{one.laddr.ip}:{one.laddr.port}" for one in listening)

    train(folder, ranks=2, during=look, env={"STEP_SECONDS": "0.1"}).check()
    outside = [place for place in found if not place.startswith(("127.", "::1", "::ffff:127."))]
    held(found and not outside, f"listens at {outside} of {found}")
    return f"{len(found)} listening sockets, all on the loopback"


class _Hosts(Network):
    """Two hosts without ssh: their ranks are started side by side."""

    def __enter__(self):
        needs_root()
        if not (shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin") and shutil.which("nsenter")):
            raise UntriedError("needs ip and nsenter (iproute2, util-linux)")
        try:
            self._wire()
        except RuntimeError as error:
            self._remove()
            raise UntriedError(f"no network namespaces: {error}") from None
        return self

    def started(self):
        """A shell that starts a rank on each host."""
        port, lines = free_port(), []
        for rank, name in enumerate(self._names.values()):
            place = f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR={NODES['node1']}"
            train = "python -m dsframe.train --config attack.json --run-dir run"
            lines.append(f'{place} MASTER_PORT={port} nsenter --net=/run/netns/{name} {train} & pids="$pids $!"')
        return ["bash", "-c", "\n".join([*lines, "for pid in $pids; do wait $pid || code=$?; done", "exit $code"])]


def two_hosts(folder, chance):
    """The cable between two hosts is pulled, for good or for a moment, or a rank killed on one of them."""
    how = chance.choice(["cut", "cut for 3 s", "rank 0 killed", "rank 1 killed"])
    with _Hosts(folder / "network") as hosts:

        def strike(running):
            first = chance.choice(["step-00000004", "step-00000008", "step-00000012"])
            running.wait_for(lambda: first in running.output, timeout_seconds=90, what=first)
            time.sleep(chance.random() / 2)
            if how.startswith("cut"):
                hosts.cut(chance.choice(list(NODES)))
                time.sleep(3.0 if "3 s" in how else 0.0)
            else:
                running.ranks()[int(how[5])].kill()
            if "3 s" in how:
                hosts.mend("node1")
                hosts.mend("node2")

        write(folder, hang_timeout_seconds=8)
        env = {"STEP_SECONDS": "0.2"}
        finished = run_ranks(hosts.started(), cwd=folder, env=env, timeout_seconds=150, while_running=strike)
        left = [*hosts.processes("node1"), *hosts.processes("node2")]
        held(not left, f"processes are left on the hosts: {left}", finished)
    if finished.returncode:
        told(finished)
        goes_on(folder, 2)
    else:
        held(how == "cut for 3 s", f"{how}, and exit code 0", finished)
        whole(folder, 2)
    return f"two hosts, {how}: exit code {finished.returncode}"


ATTACKS = {
    "garbage at the ports": garbage,
    "half-open connections": half_open,
    "stranger at the store": stranger,
    "reached from outside": loopback,
    "two hosts, link and kills": two_hosts,
}

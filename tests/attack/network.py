"""Strangers on the network: garbage and half-open connections at a run's ports, a process that speaks to its store, a cut link."""

import contextlib
import shutil
import socket
import threading
import time

import psutil

from tests.attack.arena import UntriedError, goes_on, held, needs_root, started, told, train, whole, write
from tests.cluster.network import NODES, Network
from tests.processes import run_ranks


def _listening(running):
    """Addresses and ports at which a run listens."""
    for process in running.processes():
        with contextlib.suppress(psutil.Error):
            listening = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            yield from ((one.laddr.ip, one.laddr.port) for one in listening)


def _ports(running):
    return {("127.0.0.1" if ip in ("::", "0.0.0.0") else ip, port) for ip, port in _listening(running)}


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


def loopback(folder, chance):
    """What a run on one host opens cannot be reached from another: every listening address is the loopback's."""
    found = []

    def look(running):
        running.wait_for(lambda: "step-00000004" in running.output, timeout_seconds=60, what="a save")
        found.extend(_listening(running))

    train(folder, ranks=2, during=look, env={"STEP_SECONDS": "0.1"}).check()
    outside = [place for place in found if not place[0].startswith(("127.", "::1", "::ffff:127."))]
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
        enter = [f"nsenter --net=/run/netns/{name}" for name in self._names.values()]
        return started(enter, "--config attack.json --run-dir run", NODES["node1"])


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
    "reached from outside": loopback,
    "two hosts, link and kills": two_hosts,
}

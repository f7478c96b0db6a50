"""Rendezvous of a run's processes: one address and port for torch.distributed, under any launcher.

``deepspeed``, ``torchrun`` and ``srun`` (through the job's numbers) give it. ``horovodrun`` runs a key-value server
that every process knows; rank 0 stores a free port there. ``mpirun`` gives its job's name to all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil

from dsframe.cluster.world import PORTS, Environ, World, port_of
from dsframe.errors import WorldError

if TYPE_CHECKING:
    import urllib.request

_MEETING_SECONDS = 120.0


def free_port() -> int:
    """Returns a TCP port that is currently free on this node."""
    for port in (*secrets.SystemRandom().sample(PORTS, 100), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise WorldError("this node has no free TCP port")


def interface_to(host: str) -> str | None:
    """Returns the network interface through which this machine reaches ``host``; its own if ``host`` is this machine.

    None if the name does not resolve, or only to the loopback.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing, only looks up the route
            local_address = probe.getsockname()[0]
    except OSError:
        return None
    return next(
        (interface for address, interface in addresses() if address == local_address and interface != "lo"), None
    )


def addresses() -> Iterator[tuple[str, str]]:
    """Yields this machine's addresses, each with the name of its interface."""
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            yield entry.address, interface


def bound_to(address: str) -> str:
    """Returns the address to bind to so that others reach ``address``; "" (all interfaces) if it is not known.

    A hostname often resolves to 127.0.1.1 on the node itself (Debian), and to another address elsewhere.
    """
    with contextlib.suppress(OSError):
        resolved = socket.gethostbyname(address)
        if resolved in {local for local, _ in addresses()} and (
            not resolved.startswith("127.") or address in ("localhost", resolved)
        ):
            return resolved
    return ""


def listener(address: str, port: int) -> socket.socket | None:
    """Returns a socket that listens only at ``address``; None if that is no known address of this node. Raises OSError.

    For None the caller listens on all interfaces and IPv6, as torch's server does and this socket would not.
    """
    bound = bound_to(address)
    if not bound:
        return None
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((bound, port))
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening


def meeting_point(world: World, environ: Environ | None = None) -> tuple[str, int]:
    """Returns rank 0's address and port for torch.distributed. **Collective** under ``horovodrun``, waiting for rank 0.

    Raises WorldError if the launcher gives no address and none can be determined.
    """
    environ = os.environ if environ is None else environ
    if world.master_address and world.master_port:
        return world.master_address, world.master_port
    if world.size == 1:
        return "127.0.0.1", free_port()
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return _through_horovod(world, environ)
    if "OMPI_COMM_WORLD_RANK" in environ or "PMI_RANK" in environ:
        return _through_mpi(world, environ)
    raise WorldError(f"{world.launcher} gives no rendezvous address; set MASTER_ADDR and MASTER_PORT")


def _through_mpi(world: World, environ: Environ) -> tuple[str, int]:
    """On one node, returns a port computed from the job's name, which every process of Open MPI knows."""
    if world.local_size < world.size:
        raise WorldError(
            f"{world.launcher} gives no rendezvous address for {world.size} processes on several hosts; set MASTER_ADDR to the "
            "first host's name and MASTER_PORT to a free port there (mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)"
        )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if not world.master_port and not job:  # MPICH's and Intel's Hydra sets no name that all its processes share
        raise WorldError(
            f"{world.launcher} gives no rendezvous port for {world.size} processes; set MASTER_PORT to a free one "
            "(mpirun -genv MASTER_PORT 29500 ..., Open MPI: mpirun -x MASTER_PORT=29500 ...)"
        )
    return "127.0.0.1", world.master_port or port_of(str(job))


def _through_horovod(world: World, environ: Environ) -> tuple[str, int]:
    """Rank 0 stores its address in horovodrun's key-value store (HTTP PUT and GET of /scope/key), the others read it.

    Source: horovod 0.28.1, runner/http/http_server.py (KVStoreHandler).
    """
    import urllib.request  # here and below: imports ssl and http, which no other launcher needs

    url = f"http://{environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{environ.get('HOROVOD_GLOO_RENDEZVOUS_PORT')}/dsframe/meeting_point"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    if world.is_main:
        host = "127.0.0.1" if world.local_size == world.size else environ.get("HOROVOD_HOSTNAME", socket.gethostname())
        point = f"{host} {free_port()}"
        opener.open(urllib.request.Request(url, data=point.encode(), method="PUT"), timeout=_MEETING_SECONDS).close()
    else:
        point = _read_when_there(opener, url)
    address, port = point.split()
    return address, int(port)


def _read_when_there(opener: urllib.request.OpenerDirector, url: str) -> str:
    import urllib.error

    deadline = time.monotonic() + _MEETING_SECONDS
    while True:
        try:
            with opener.open(url, timeout=_MEETING_SECONDS) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
        if time.monotonic() > deadline:
            raise WorldError(f"rank 0 did not say where to meet within {_MEETING_SECONDS:.0f} seconds; did it start?")
        time.sleep(0.05)

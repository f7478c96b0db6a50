"""The hosts of a run and how many processes each of them gets, from whatever names them.

Known: ``host1:4,host2:4`` on the command line (Horovod's and Open MPI's spelling), host files (DeepSpeed's ``host slots=4`` and
Horovod's ``host:4``, Open MPI reads the first), and Slurm's variables inside an allocation.
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsframe.cluster.rendezvous import addresses
from dsframe.cluster.world import slurm_hosts, slurm_tasks
from dsframe.errors import WorldError

_LINE = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(?::(\d+)|\s+slots\s*=\s*(\d+))?(?:\s+max[_-]slots\s*=\s*\d+)?")


@dataclass(frozen=True)
class Host:
    """One machine of the run."""

    name: str
    slots: int
    """Processes that may run there; GPUs, where there are any."""

    @property
    def is_here(self) -> bool:
        """True if it is this machine, by name or by an address of its own."""
        return is_here(self.name)


def parse(text: str) -> tuple[Host, ...]:
    """Hosts from ``host1:4,host2:4``; without a number a host has one slot. Raises WorldError, quoting what it cannot read."""
    return _each_once([_host(part.strip(), f'-H {text}: "{part.strip()}"') for part in text.split(",")], f"-H {text}")


def read_file(path: Path) -> tuple[Host, ...]:
    """Hosts from a file, one a line, ``#`` starts a comment. Raises WorldError with file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WorldError(f"the host file {path} cannot be read: {error.strerror}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip()
        if entry:
            hosts.append(_host(entry, f'{path}:{number}: "{entry}"'))
    if not hosts:
        raise WorldError(f"the host file {path} names no host")
    return _each_once(hosts, str(path))


def from_slurm(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts of this Slurm allocation with their tasks; empty outside of one."""
    names = slurm_hosts(environ.get("SLURM_JOB_NODELIST", ""))
    layout = environ.get("SLURM_TASKS_PER_NODE")
    counts = slurm_tasks(layout) if layout else [1] * len(names)
    return tuple(Host(name, count) for name, count in zip(names, counts, strict=True))


def share(hosts: tuple[Host, ...], processes: int | None) -> tuple[Host, ...]:
    """The hosts with ``processes`` in all, filled in order as every launcher does; all slots where it is None.

    Raises WorldError where there are more processes than slots.
    """
    slots = sum(host.slots for host in hosts)
    wanted = slots if processes is None else processes
    if wanted > slots:
        raise WorldError(
            f"{wanted} processes, but the hosts have {slots} slots: {show(hosts)}; raise slots or lower -np"
        )
    used = []
    for host in hosts:
        taken = min(host.slots, wanted)
        wanted -= taken
        if taken:
            used.append(Host(host.name, taken))
    return tuple(used)


def show(hosts: tuple[Host, ...]) -> str:
    """``host1:4,host2:4``."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def is_here(name: str) -> bool:
    """True if ``name`` is this machine."""
    own = socket.gethostname()
    if name in ("localhost", "127.0.0.1", own, own.partition(".")[0]):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return bool(found & {address for address, _ in addresses()})


def _host(text: str, where: str) -> Host:
    found = _LINE.fullmatch(text)
    if not found:
        raise WorldError(f'{where} is not a host; write "name:4" or "name slots=4"')
    slots = int(found[2] or found[3] or 1)
    if slots < 1:
        raise WorldError(f"{where}: a host needs at least one slot; remove the host instead")
    return Host(found[1], slots)


def _each_once(hosts: list[Host], where: str) -> tuple[Host, ...]:
    twice = sorted(name for name, count in Counter(host.name for host in hosts).items() if count > 1)
    if twice:
        raise WorldError(f"{where}: {', '.join(twice)} is listed more than once; write one entry with all its slots")
    return tuple(hosts)

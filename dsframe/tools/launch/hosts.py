"""The hosts of a run and the processes of each.

Sources: ``host1:4,host2:4`` on the command line (Horovod's and Open MPI's notation), host files (lines ``host
slots=4``, as for DeepSpeed, Open MPI and Horovod), and Slurm's variables.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dsframe.cluster.rendezvous import addresses
from dsframe.cluster.world import Environ, slurm_hosts, slurm_tasks
from dsframe.errors import WorldError

_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(?::(\d+)|\s+slots\s*=\s*(\d+))?(?:\s+max[_-]slots\s*=\s*\d+)?")


@dataclass(frozen=True)
class Host:
    """One machine of the run."""

    name: str
    """Name or address."""
    slots: int
    """Largest number of processes on it; one per GPU if it has any."""

    @property
    def is_here(self) -> bool:
        """True if it is this machine, by name or address."""
        name = socket.gethostname()
        if self.name in ("localhost", "127.0.0.1", name, name.partition(".")[0]):
            return True
        try:
            entries = socket.getaddrinfo(self.name, None)
        except OSError:
            return False
        local_addresses = {address for address, _ in addresses()}
        return any(str(entry[4][0]) in local_addresses for entry in entries)


def parse(entries: Iterable[str], source: str) -> tuple[Host, ...]:
    """Parses hosts from ``-H`` or the lines of a file. Raises WorldError that names ``source``."""
    hosts: dict[str, Host] = {}
    for entry in filter(None, (entry.partition("#")[0].strip() for entry in entries)):
        match = _HOST.fullmatch(entry)
        slots = int(match[2] or match[3] or 1) if match else 0
        if match is None or slots < 1 or match[1] in hosts:
            raise WorldError(f'{source}: "{entry}"; write each host once, as "name:4" or "name slots=4"')
        hosts[match[1]] = Host(match[1], slots)
    if not hosts:
        raise WorldError(f"{source} names no host")
    return tuple(hosts.values())


def read_file(path: Path) -> tuple[Host, ...]:
    """Returns the hosts of a host file. Raises WorldError."""
    try:
        return parse(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), str(path))
    except OSError as error:
        raise WorldError(f"the host file {path} cannot be read: {error.strerror}") from None


def from_slurm(environ: Environ) -> tuple[Host, ...]:
    """Returns the hosts of this Slurm allocation with their tasks; empty outside of one."""
    names = slurm_hosts(environ.get("SLURM_JOB_NODELIST", ""))
    layout = environ.get("SLURM_TASKS_PER_NODE")
    counts = slurm_tasks(layout) if layout else [1] * len(names)
    return tuple(Host(name, count) for name, count in zip(names, counts, strict=True))


def show(hosts: tuple[Host, ...]) -> str:
    """Returns ``host1:4,host2:4``."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)

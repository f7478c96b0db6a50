"""Rank, size, node and launcher of this process, read once from the environment.

Each launcher sets variables of its own. :func:`read` knows them all, so that any engine runs under any launcher, and
refuses an environment that contradicts itself. Imports no torch: thread counts and device visibility must be set
before.

Sources: the launchers' documentation and ``facts`` measured with deepspeed 0.19.8, horovod 0.28.1, torchrun 2.13, Open
MPI 4.1, Slurm 22.05; MPICH and Intel MPI names from their Hydra process managers.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dsframe.errors import WorldError

Environ = Mapping[str, str]
"""A process's environment variables."""
Launcher = Literal["deepspeed", "torchrun", "horovodrun", "mpirun", "srun", "python"]
PORTS = range(15_000, 32_000)
"""Ports below those that Linux gives to connections by itself (``net.ipv4.ip_local_port_range``): rank 0 listens seconds
after its port was chosen, and a connection may have got it by then."""


def port_of(job: str) -> int:
    """Returns a port computed from the name of a job, the same on each of its processes."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


@dataclass(frozen=True)
class World:
    """One process's position among all processes of a run."""

    rank: int = 0
    """0 to size - 1 over all nodes; rank 0 prints and writes."""
    size: int = 1
    """Number of processes of the run."""
    local_rank: int = 0
    """0 to local_size - 1 on this node; chooses the GPU."""
    local_size: int = 1
    """Number of processes on this node."""
    node: int = 0
    """0-based number of this node."""
    launcher: Launcher = "python"
    """The launcher that started this process."""
    master_address: str | None = None
    """Hostname of rank 0, if the launcher sets it."""
    master_port: int | None = None
    """TCP port at which rank 0 listens for torch.distributed, if the launcher sets it."""

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise WorldError(
                f"{self.launcher}: rank {self.rank} of {self.size}, local rank {self.local_rank} of {self.local_size}: "
                "these do not fit together; was the environment of another job inherited? Start from a fresh shell"
            )

    @property
    def is_main(self) -> bool:
        """True for the one process that prints and writes."""
        return self.rank == 0


@dataclass(frozen=True)
class _Names:
    """The variables that one launcher sets. ``rank`` and ``size`` identify the launcher."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str = ""
    """Number of the node. Empty: computed from the ranks, if every node has equally many."""


_OPEN_MPI = _Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_MPIS = (
    _OPEN_MPI,
    _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra, of MPICH and Intel MPI
)
"""Variables of mpirun and mpiexec. Slurm sets PMI_RANK too."""

# Innermost first: torchrun inside srun, or horovodrun inside an sbatch script, see the outer launcher's variables too.
_NAMES: dict[Launcher, _Names] = {
    "torchrun": _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "deepspeed": _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"),
    "horovodrun": _Names(
        "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK"
    ),
    "mpirun": _OPEN_MPI,
    "srun": _Names(
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"
    ),
}
_ONE_OF_MANY = ("PMI_SIZE", "PALS_LOCAL_SIZE")
"""Variables that, if above 1, show that there are other processes, whichever launcher started them."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def _launcher(environ: Environ) -> Launcher:
    """Returns the launcher whose variables are set. Raises WorldError if there are two."""
    launchers: list[Launcher] = []
    if "RANK" in environ and "WORLD_SIZE" in environ and not _repeats_slurm(environ):
        launchers.append(
            "deepspeed" if "LOCAL_SIZE" in environ and "TORCHELASTIC_RUN_ID" not in environ else "torchrun"
        )
    if "HOROVOD_RANK" in environ and "HOROVOD_SIZE" in environ:
        launchers.append("horovodrun")
    if _is_horovods_mpirun(environ):
        launchers.append("horovodrun")
    elif "OMPI_COMM_WORLD_RANK" in environ or _mpi(environ):
        launchers.append("mpirun")
    if not launchers and "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        # An srun around another launcher is usual and starts one task per node, so srun counts only if it is the only
        # launcher.
        launchers.append("srun")
    if len(launchers) > 1:
        first, second = launchers[:2]
        names = [_names(launcher, environ) for launcher in (first, second)]
        raise WorldError(
            f"two launchers at once: {first} ({names[0].rank}={environ[names[0].rank]}) and "
            f"{second} ({names[1].rank}={environ[names[1].rank]}); unset the variables of the one that did not start this run"
        )
    many = next((name for name in _ONE_OF_MANY if environ.get(name, "1") not in ("0", "1")), None)
    if not launchers and many:
        raise WorldError(
            f"{many}={environ[many]} says that this is one of several processes, but dsframe does not know the launcher that "
            "started them; start them with one of deepspeed, torchrun, horovodrun, mpirun and srun, or export RANK, WORLD_SIZE, "
            "LOCAL_RANK and LOCAL_WORLD_SIZE (and MASTER_ADDR and MASTER_PORT) in each"
        )
    return launchers[0] if launchers else "python"


def _mpi(environ: Environ) -> _Names | None:
    return next((names for names in _MPIS if {names.rank, names.local_rank} <= environ.keys()), None)


def _repeats_slurm(environ: Environ) -> bool:
    """True if RANK and WORLD_SIZE were set from srun's variables, which then say the same and more."""
    same = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
    return not {"LOCAL_WORLD_SIZE", "LOCAL_SIZE"} & environ.keys() and all(
        environ[name] == environ.get(slurm) for name, slurm in same.items()
    )


def _is_horovods_mpirun(environ: Environ) -> bool:
    """True if horovodrun started mpirun, as it does if Horovod was built with MPI.

    Then no variable of Horovod's is set, but the options that it always gives to Open MPI are. Source: horovod 0.28.1,
    runner/mpi_run.py.
    """
    asked = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib", "OMPI_MCA_orte_tag_output": "1"}
    return "OMPI_COMM_WORLD_RANK" in environ and all(environ.get(name) == value for name, value in asked.items())


def _names(launcher: Launcher, environ: Environ) -> _Names:
    over_mpi = launcher == "mpirun" or (launcher == "horovodrun" and "HOROVOD_RANK" not in environ)
    return (_mpi(environ) if over_mpi else None) or _NAMES[launcher]


def _local_size(environ: Environ, name: str, size: int) -> int:
    """Returns the number of processes on this node. Raises WorldError if it is not set and there may be other nodes."""
    address = environ.get("MASTER_ADDR")
    if name != "LOCAL_WORLD_SIZE" or name in environ:
        return _integer(environ, name, 1 if size == 1 else None)
    if size > 1 and address not in (None, *_LOOPBACK):
        raise WorldError(
            f"{name} is not set, and MASTER_ADDR={address} may be another host: say how many of the {size} processes run on "
            f"this one (export {name}={size} where all of them do)"
        )
    return size


def _integer(environ: Environ, name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise WorldError(
            f"{name} is not set, though the launcher's other variables are; was the environment passed on whole?"
        )
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name}={text!r} is not an integer") from None


def slurm_tasks(layout: str) -> list[int]:
    """Returns the number of tasks on each node from Slurm's compressed list, such as ``2(x3),1`` for 2, 2, 2, 1."""
    counts: list[int] = []
    for part in layout.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts


_HOST = r"(?:[^\s,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"


def slurm_hosts(nodelist: str) -> list[str]:
    """Expands Slurm's compressed list of hosts: ``node[03-04,9],gpu1`` gives node03, node04, node9 and gpu1.

    With several brackets in one name the last varies fastest. Raises WorldError if the text is not such a list.
    """
    if nodelist and not re.fullmatch(f"{_HOST}(?:,{_HOST})*", nodelist):
        raise WorldError(f"{nodelist!r} is not a list of hosts in Slurm's form, such as node[03-04,9],gpu1")
    hosts: list[str] = []
    for entry in re.findall(_HOST, nodelist):
        pieces = [_numbers(piece) for piece in re.findall(r"\[[^\]]*\]|[^\[]+", entry)]
        hosts += ["".join(names) for names in itertools.product(*pieces)]
    return hosts


def _numbers(piece: str) -> list[str]:
    """Expands a part of such a name: ``[03-05,9]`` to 03, 04, 05 and 9; any other text is returned as it is."""
    if not piece.startswith("["):
        return [piece]
    names: list[str] = []
    for part in piece[1:-1].split(","):
        first, _, last = part.partition("-")
        names += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return names


_worlds: list[World] = []


def here() -> World:
    """Returns this process's position. Read once, because engines later set variables that would be misread."""
    if not _worlds:
        _worlds.append(read(os.environ))
    return _worlds[-1]


def read(environ: Environ) -> World:
    """Returns the position that ``environ`` describes.

    Raises WorldError, naming the variables, if those of two launchers are set or the numbers do not fit.
    """
    launcher = _launcher(environ)
    if launcher == "python":
        return World()
    if launcher == "horovodrun" and environ.get("HOROVOD_ELASTIC") == "1":
        raise WorldError(
            "elastic runs of horovodrun (--min-np, --max-np, --host-discovery-script) are not supported: write -np; "
            "dsframe launch --restarts N continues from the newest checkpoint after a failure"
        )
    names = _names(launcher, environ)
    rank, size = _integer(environ, names.rank), _integer(environ, names.size)
    if launcher == "srun":
        node = _integer(environ, names.node, 0)
        local_size = slurm_tasks(environ.get(names.local_size, str(size)))[node]
        address: str | None = (
            environ.get("MASTER_ADDR") or slurm_hosts(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))[0]
        )
        step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
        port: int | None = _integer(environ, "MASTER_PORT", port_of(step))
    else:
        local_size = _local_size(environ, names.local_size, size)
        node = _integer(environ, names.node, rank // local_size) if names.node else rank // local_size
        address = environ.get("MASTER_ADDR")
        port = _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
    return World(
        rank=rank,
        size=size,
        local_rank=_integer(environ, names.local_rank, rank % local_size),
        local_size=local_size,
        node=node,
        launcher=launcher,
        master_address=address,
        master_port=port,
    )

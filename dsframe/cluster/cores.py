"""Each rank on cores of its own, under every launcher. DeepSpeed's ``--bind_cores_to_rank`` does this under its own launcher
alone, and needs numactl. Imports no torch: its thread pools take the affinity that they find when they start."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dsframe.cluster.world import World
from dsframe.errors import WorldError

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"
_INSTRUCTIONS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""Flags of x86 and of Arm, as Linux names them."""


def bind(world: World) -> tuple[int, ...]:
    """Binds this process to its share of the host's usable cores and returns it.

    What a launcher has bound already (mpirun, srun and numactl do) stays as it is. Raises WorldError where there are fewer cores
    than ranks.
    """
    allowed = os.sched_getaffinity(0)
    if allowed < _affinity(os.getppid()):
        return tuple(sorted(allowed))
    chosen = share(by_core(allowed), world.local_rank, world.local_size)
    os.sched_setaffinity(0, chosen)
    return chosen


def describe(bound: tuple[int, ...]) -> str | None:
    """Returns a line about rank 0's cores."""
    return f"each rank is bound to cores of its own, rank 0 to {', '.join(map(str, bound))}" if bound else None


def available(world: World) -> int:
    """Cores for this rank's threads: its part of the host's, and no fewer than ``srun --cpus-per-task`` has given it alone."""
    here, given = len(os.sched_getaffinity(0)), os.environ.get("SLURM_CPUS_PER_TASK", "")
    assigned = min(here, int(given)) if world.launcher == "srun" and given.isdecimal() else 1
    return max(here // world.local_size, assigned)


def share(cores: tuple[int, ...], rank: int, ranks: int) -> tuple[int, ...]:
    """The ``rank``-th of ``ranks`` runs of neighbouring ``cores``, of equal length but for one core. Raises WorldError."""
    if len(cores) < ranks:
        raise WorldError(
            f"dsframe.bind_cores: {ranks} ranks on this host, but only {len(cores)} usable core(s); "
            "start fewer ranks, allow the job more cores, or remove bind_cores"
        )
    return cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]


def by_core(usable: Iterable[int]) -> tuple[int, ...]:
    """Logical CPUs so that neighbours share a core, then a socket: cut into runs, no two ranks get halves of one core."""
    return tuple(sorted(usable, key=lambda cpu: (_number(cpu, "physical_package_id"), _number(cpu, "core_id"), cpu)))


def _number(cpu: int, what: str) -> int:
    try:
        return int(Path(_TOPOLOGY.format(cpu, what)).read_text())
    except (OSError, ValueError):
        return cpu


def _affinity(process: int) -> set[int]:
    try:
        return os.sched_getaffinity(process)
    except OSError:  # gone, or hidden
        return set()


def emulates(dtype: str, information: Path = Path("/proc/cpuinfo")) -> bool:
    """True if this host's processor is known to have no instructions for numbers of ``dtype``, "bfloat16" or "float16"."""
    try:
        lines = information.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    known = {
        word for line in lines if line.startswith(("flags", "Features")) for word in line.partition(":")[2].split()
    }
    return bool(known) and not known & _INSTRUCTIONS[dtype]

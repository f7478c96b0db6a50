"""The host's cores, and what its processor can do. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from dsframe.cluster.world import World

_INSTRUCTIONS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""Flags of x86 and of Arm, as Linux names them."""


def available(world: World) -> int:
    """Cores for this rank's threads: its part of the host's, and no fewer than ``srun --cpus-per-task`` has given it alone."""
    here, given = len(os.sched_getaffinity(0)), os.environ.get("SLURM_CPUS_PER_TASK", "")
    assigned = min(here, int(given)) if world.launcher == "srun" and given.isdecimal() else 1
    return max(here // world.local_size, assigned)


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

"""The GPUs of this machine that a run may use, counted without starting CUDA, which is left to the processes."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

from dsframe.cluster.world import Environ
from dsframe.host import processes

FOLDER = Path("/dev")


def accelerators() -> bool:
    """True if there is a device file of an accelerator for DeepSpeed. ``launch/bin/deepspeed`` checks the same."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel"))


def installed(folder: Path | None = None) -> int:
    """Returns the number of GPUs by their device files. On WSL2 there are none, so Windows' nvidia-smi is asked."""
    folder = folder or FOLDER
    count = len(list(folder.glob("nvidia[0-9]*")))
    if count or not (folder / "dxg").exists():
        return count
    environ = os.environ | {"PATH": os.environ.get("PATH", os.defpath) + ":/usr/lib/wsl/lib"}
    listed = processes.output_of(["nvidia-smi", "-L"], 20, environ=environ) or ""
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def visible(environ: Environ, folder: Path | None = None) -> tuple[str, ...]:
    """Returns all GPU numbers, or those of CUDA_VISIBLE_DEVICES up to the first invalid one, as CUDA does.

    ``launch/gpus`` does the same for the scripts next to it.
    """
    count = installed(folder)
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None or not count:
        return tuple(map(str, range(count)))

    def is_one(name: str) -> bool:
        return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count)

    return tuple(takewhile(is_one, map(str.strip, given.split(","))))


def hidden(environ: Environ) -> bool:
    """True if this machine has GPUs and CUDA_VISIBLE_DEVICES shows none of them."""
    return "CUDA_VISIBLE_DEVICES" in environ and installed() > 0 and not visible(environ)

"""The GPUs of this machine that a run may take, counted without CUDA, which is the processes' to start."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

FOLDER = Path("/dev")


def visible(environ: Mapping[str, str], folder: Path | None = None) -> tuple[str, ...]:
    """All, by number, or those of CUDA_VISIBLE_DEVICES up to the first that is none, as CUDA reads it.

    ``launch/gpus`` counts the same for the scripts beside it.
    """
    count = len(list((folder or FOLDER).glob("nvidia[0-9]*")))
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None or not count:
        return tuple(map(str, range(count)))

    def is_one(name: str) -> bool:
        return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count)

    return tuple(takewhile(is_one, map(str.strip, given.split(","))))

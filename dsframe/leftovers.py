"""What killed runs leave on a host: locks of half-done builds, and DeepSpeed's buffers in shared memory.

torch guards the compilation of an operator with a lock file; a process killed while it holds one leaves it behind, and every
later run waits for it for ever without a word. DeepSpeed on CPUs makes a buffer of 66 MiB a rank in /dev/shm, which is memory,
and never removes it. Either is a remnant when no living process has it open.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
BUFFERS = "deepspeed_allreduce_buffer_*"


def stale_locks(cache: Path) -> list[Path]:
    """The build locks right under the operators of ``cache`` that no living process of this host holds open."""
    locks = {path.resolve() for path in cache.glob("*/lock")}
    return sorted(locks - _open_files() if locks else locks)


def unused_buffers(directory: Path = SHARED_MEMORY) -> list[Path]:
    """This user's buffers of DeepSpeed that no living process has mapped or open."""
    buffers = {path for path in directory.glob(BUFFERS) if path.stat().st_uid == os.getuid()}
    return sorted(buffers - _open_files() - _mapped_files() if buffers else buffers)


def _open_files() -> set[Path]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or gone meanwhile
            found |= {Path(file.path).resolve() for file in process.open_files()}
    return found


def _mapped_files() -> set[Path]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found |= {Path(region.path) for region in process.memory_maps()}
    return found

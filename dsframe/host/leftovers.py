"""Leftovers of killed runs on a host: locks of unfinished builds, and buffers in shared memory.

torch guards the compilation of an operator with a lock file; a process killed while it holds one leaves it behind, and every
later run waits for it for ever without a word. DeepSpeed on CPUs makes a buffer of 66 MiB a rank in /dev/shm, which is memory,
and never removes it; Open MPI 4 leaves one of 4 MiB a rank when its job is killed. Any of these is a remnant when no living
process has it open.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""Types of file systems that belong to one host. Others may be shared."""
BUFFERS = ("deepspeed_allreduce_buffer_*", "vader_segment.*")


def stale_locks(cache: Path) -> list[Path]:
    """The build locks right under the operators of ``cache`` that no living process of this host holds open.

    None where processes of other hosts may hold them.
    """
    locks = {path.resolve() for path in cache.glob("*/lock")}
    if locks and is_shared(cache):
        return []
    return sorted(locks - _files_in_use() if locks else locks)


def is_shared(folder: Path) -> bool:
    """True if other hosts may write to ``folder``: on a network's file system, unless it has this host's name."""
    kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    file_system = next((kinds[parent] for parent in (resolved, *resolved.parents) if parent in kinds), "")
    return bool(file_system) and file_system not in LOCAL and resolved.name != host()


def unused_buffers(directory: Path = SHARED_MEMORY) -> list[Path]:
    """This user's buffers of DeepSpeed and Open MPI that no living process has mapped or open."""
    buffers = set()
    for path in (path for pattern in BUFFERS for path in directory.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):  # its owner has removed it meanwhile
            if path.stat().st_uid == os.getuid():
                buffers.add(path)
    return sorted(buffers - _files_in_use() if buffers else buffers)


def unused_swap(directory: Path) -> list[Path]:
    """Folders right under ``directory`` into which runs on this host swapped whose process is no longer alive."""
    name = re.compile(rf"dsframe-{re.escape(host())}-(\d+)-[0-9a-f]{{8}}")
    try:
        matches = [(path, match) for path in directory.iterdir() if (match := name.fullmatch(path.name))]
    except OSError:
        return []
    return sorted(path for path, match in matches if not psutil.pid_exists(int(match[1])))


def host() -> str:
    """This host, as it is part of the names of folders that are its own."""
    return socket.gethostname().partition(".")[0]


def _files_in_use() -> set[Path]:
    """Files that some living process has open or mapped."""
    paths = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or gone meanwhile
            paths |= {Path(file.path).resolve() for file in process.open_files()}
            paths |= {Path(region.path) for region in process.memory_maps()}
    return paths

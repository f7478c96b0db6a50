"""Finds leftovers of killed runs on a node: locks of unfinished builds, and buffers in shared memory.

Torch guards the compilation of an operator with a lock file. If its process is killed, every later run silently waits
for it forever. DeepSpeed on CPUs creates a buffer of 66 MiB a rank in /dev/shm, which is memory, and never removes it;
Open MPI 4 leaves one of 4 MiB a rank when its job is killed. Each is a leftover if no running process has it open.
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
"""File system types that belong to one node. Others may be shared."""
BUFFERS = ("deepspeed_allreduce_buffer_*", "vader_segment.*")


def stale_locks(cache: Path) -> list[Path]:
    """Returns the build locks directly below the operators in ``cache`` that no running process on this node holds
    open. Returns [] if processes on other nodes may hold them."""
    locks = {path.resolve() for path in cache.glob("*/lock")}
    if locks and is_shared(cache):
        return []
    return sorted(locks - _files_in_use() if locks else locks)


def is_shared(folder: Path) -> bool:
    """Returns True if other nodes may write to ``folder``, on a network file system and not named after this node."""
    kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    file_system = next((kinds[parent] for parent in (resolved, *resolved.parents) if parent in kinds), "")
    return bool(file_system) and file_system not in LOCAL and resolved.name != host()


def unused_buffers(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Returns this user's buffers of DeepSpeed and Open MPI that no running process has mapped or open."""
    buffers = set()
    for path in (path for pattern in BUFFERS for path in directory.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):  # its owner has removed it
            if path.stat().st_uid == os.getuid():
                buffers.add(path)
    return sorted(buffers - _files_in_use() if buffers else buffers)


def unused_swap(directory: Path) -> list[Path]:
    """Returns the swap folders directly below ``directory`` that belong to finished processes of this node."""
    name = re.compile(rf"dsframe-{re.escape(host())}-(\d+)-[0-9a-f]{{8}}")
    try:
        matches = [(path, match) for path in directory.iterdir() if (match := name.fullmatch(path.name))]
    except OSError:
        return []
    return sorted(path for path, match in matches if not psutil.pid_exists(int(match[1])))


def host() -> str:
    """Returns this node's name as used in the names of its folders."""
    return socket.gethostname().partition(".")[0]


def _files_in_use() -> set[Path]:
    paths = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or already ended
            paths |= {Path(file.path).resolve() for file in process.open_files()}
            paths |= {Path(region.path) for region in process.memory_maps()}
    return paths

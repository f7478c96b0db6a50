"""Memory of a process: its peak, and whether freed memory is kept for the next step. By default glibc returns large
freed blocks to the system and takes them again in the next step, page by page: hundreds to thousands of page faults a
step, 3 to 6 % of a small model's time on a CPU (measured, glibc 2.36). Keeping them does not change the peak."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from pathlib import Path

import torch

_STATUS, _CGROUP = Path("/proc/self/status"), Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 32 << 20  # glibc's maximum: half of one of its heaps
_SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)


def peak_memory_bytes(device: torch.device) -> int:
    """Returns bytes: on a GPU torch's peak allocation, on a CPU this process's largest resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # Unlike getrusage, this excludes memory that the launcher held before it became this process.
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_bytes(device: torch.device, processes: int) -> int:
    """Returns the bytes that each of ``processes`` on this node can still allocate: GPU memory, or on a CPU a share of
    the memory of the system or control group (version 2), whichever has less left."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    import psutil  # here, because no run needs it at start

    left = [int(psutil.virtual_memory().available)]
    if membership := _CGROUP.exists() and re.search(r"^0::(/.*)$", _CGROUP.read_text(), re.MULTILINE):
        path = _CGROUPS / membership[1].lstrip("/")
        for group in (path, *path.parents):
            limit, used = group / "memory.max", group / "memory.current"
            if limit.is_file() and (text := limit.read_text().strip()) != "max":
                left.append(int(text) - int(used.read_text()))
    return max(min(left), 0) // processes


def reset_peak(device: torch.device) -> None:
    """Resets a GPU's peak after the set-up, so that it shows the peak of training."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def resident_bytes(device: torch.device) -> int:
    """Returns the resident bytes of this process before training on a CPU; 0 on a GPU, whose peak counts only torch's
    own tensors. Makes one step of one weight first, to include what torch loads then."""
    if device.type == "cuda":
        return 0
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW([weight]).step()
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return int(match[1]) * 1024 if match else 0


def give_back() -> bool:
    """Makes glibc return freed blocks from 256 KiB on to the system, for large sharded models; the opposite of
    :func:`keep_freed`.

    Kept blocks fragment there, because gathered weights, gradients and buckets vary in size: a Llama of 57 M parameters
    took 1,257 MiB a rank on FSDP with :func:`keep_freed`, 585 with this (``benchmarks.sharded_memory``, 2 ranks). From
    1 MiB on, a bf16 model of 51 M with slightly smaller matrices took 540 instead of 433, in the same processor time.
    """
    return _set_malloc(1 << 18, 1 << 17)


def keep_freed() -> bool:
    """Makes glibc keep freed memory. Returns False if the user has configured malloc, or without glibc."""
    return _set_malloc(LARGEST, 2**31 - 1)


def _set_malloc(mmap_from: int, trim_from: int) -> bool:
    if any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mmap_from)) and bool(mallopt(_TRIM_THRESHOLD, trim_from))

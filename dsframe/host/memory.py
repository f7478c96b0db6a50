"""Peak memory of a process."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import psutil
import torch

_STATUS, _CGROUP = Path("/proc/self/status"), Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def peak_memory_bytes(device: torch.device) -> int:
    """Returns bytes: on a GPU torch's peak allocation, on a CPU this process's largest resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():  # unlike getrusage, without what the launcher held before it became this process
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        if found:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def available_bytes(device: torch.device, processes: int) -> int:
    """Returns bytes that one of ``processes`` on this host can still take: of the GPU's memory, on a CPU its share of the system's
    or of its control group's (version 2), whichever has less left."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    left = [int(psutil.virtual_memory().available)]
    if own := _CGROUP.exists() and re.search(r"^0::(/.*)$", _CGROUP.read_text(), re.MULTILINE):
        path = _CGROUPS / own[1].lstrip("/")
        for group in (path, *path.parents):
            limit, used = group / "memory.max", group / "memory.current"
            if limit.is_file() and (text := limit.read_text().strip()) != "max":
                left.append(int(text) - int(used.read_text()))
    return max(min(left), 0) // processes


def reset_peak(device: torch.device) -> None:
    """Has a GPU's peak begin anew, after the set-up: what training takes shall not hide behind it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def resident_bytes(device: torch.device) -> int:
    """Returns this process's resident set before training on a CPU, after one step of one weight, so that what
    torch loads at its first step is included. 0 on a GPU, whose peak counts torch's own tensors alone."""
    if device.type == "cuda" or not _STATUS.exists():
        return 0
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW([weight]).step()
    found = re.search(r"VmRSS:\s+(\d+) kB", _STATUS.read_text())
    return int(found[1]) * 1024 if found else 0

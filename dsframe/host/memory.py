"""Peak memory of a process."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_memory_bytes(device: torch.device) -> int:
    """Returns bytes: on a GPU torch's peak allocation, on a CPU this process's largest resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():  # unlike getrusage, without what the launcher held before it became this process
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        if found:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


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

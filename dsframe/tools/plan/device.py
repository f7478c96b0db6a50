"""The memory of one device: this machine's, or that of GPUs of a given size."""

from __future__ import annotations

from dataclasses import dataclass

GPU_BASE_BYTES = 0.6e9
"""What CUDA's context and NCCL's buffers take of a GPU that is not here: an assumption."""


@dataclass(frozen=True)
class Device:
    """What one process has."""

    name: str
    memory_bytes: float
    """Of the device: of a GPU, or of one process's part of the CPU's memory."""
    host_memory_bytes: float = float("inf")
    """One process's part of the host's memory. Infinite where the host is not known."""
    base_bytes: float = 0.0
    """What a process takes whatever its model."""
    on_cpu: bool = False
    """True if processes compute on CPUs: memory that nothing was written to takes none."""
    measured: bool = False

    def __str__(self) -> str:
        origin = "measured" if self.measured else "assumed"
        return (
            f"{self.name}: {self.memory_bytes / 1e9:.3g} GB for each process, of which it takes "
            f"{self.base_bytes / 1e9:.2g} GB before it has a model ({origin})"
        )


def gpu(memory_bytes: float) -> Device:
    """A GPU of this size, somewhere."""
    return Device("GPU", memory_bytes, base_bytes=GPU_BASE_BYTES)


def this_machine(processes: int) -> Device:
    """This machine with so many processes. Each takes what this one takes; of a GPU, what is in use when CUDA has started."""
    import psutil
    import torch

    memory = psutil.virtual_memory().total
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        host = memory / min(processes, torch.cuda.device_count())
        return Device("this machine", total, host, total - free, measured=True)
    base = psutil.Process().memory_info().rss  # of this process, which has imported torch
    return Device("this machine", memory / processes, base_bytes=base, on_cpu=True, measured=True)

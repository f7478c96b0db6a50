"""The memory of one device: of this machine, or of GPUs of a given size."""

from __future__ import annotations

from dataclasses import dataclass

GPU_BASE_BYTES = 0.6e9
"""Assumed size of CUDA's context and NCCL's buffers on a GPU that is not here."""


@dataclass(frozen=True)
class Device:
    """What one process has."""

    name: str
    memory_bytes: float
    """Memory of the GPU, or one process's part of the CPU's."""
    host_memory_bytes: float = float("inf")
    """One process's part of host memory; infinite if unknown."""
    base_bytes: float = 0.0
    """Memory of a process without a model."""
    on_cpu: bool = False
    """True if processes compute on CPUs, where memory that is never written takes no space."""
    measured: bool = False

    def __str__(self) -> str:
        origin = "measured" if self.measured else "assumed"
        return (
            f"{self.name}: {self.memory_bytes / 1e9:.3g} GB for each process, of which it takes "
            f"{self.base_bytes / 1e9:.2g} GB before it has a model ({origin})"
        )


def gpu(memory_bytes: float) -> Device:
    """Returns a GPU of this size that is not in this machine."""
    return Device("GPU", memory_bytes, base_bytes=GPU_BASE_BYTES)


def this_machine(processes: int) -> Device:
    """Returns this machine with so many processes. Base: this process's memory; of a GPU, what is used after CUDA's
    start."""
    import psutil
    import torch

    memory = psutil.virtual_memory().total
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        host = memory / min(processes, torch.cuda.device_count())
        return Device("this machine", total, host, total - free, measured=True)
    base = psutil.Process().memory_info().rss  # this process has imported torch
    return Device("this machine", memory / processes, base_bytes=base, on_cpu=True, measured=True)

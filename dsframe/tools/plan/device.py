"""The memory of one device, which a plan is made for: this machine's, or that of GPUs of a given size."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

GPU_BASE_BYTES = 0.6e9
"""What CUDA's context and NCCL's buffers take, of a GPU that is not here: an assumption."""
_MEASURE = """\
import json, sys
import torch
from dsframe import engines
from dsframe.errors import EngineError
from dsframe.config import load
from dsframe.host.memory import resident_bytes
try:
    engines.load(sys.argv[1], load({"train_batch_size": 1}))
except EngineError:
    pass  # not installed here
if torch.cuda.is_available():
    free, total = torch.cuda.mem_get_info()
    print(json.dumps([total - free, total]))
else:
    print(json.dumps([resident_bytes(torch.device("cpu")), None]))
"""


@dataclass(frozen=True)
class Device:
    """What one process has."""

    name: str
    memory_bytes: float
    """Of the device: of a GPU, or of one process's share of the CPU's memory."""
    host_memory_bytes: float
    """Of the host's memory, one process's share. Infinite where the host is not known."""
    base_bytes: float
    """What a process takes before it has a model."""
    on_cpu: bool = False
    """True if processes compute on CPUs: memory that nothing was written to takes none."""

    def __str__(self) -> str:
        origin = "measured" if self.name == THIS_MACHINE else "assumed"
        return (
            f"{self.name}: {self.memory_bytes / 1e9:.3g} GB for each process, of which it takes "
            f"{self.base_bytes / 1e9:.2g} GB before it has a model ({origin})"
        )


THIS_MACHINE = "this machine"


def gpu(memory_bytes: float) -> Device:
    """A GPU of this size, somewhere."""
    return Device("GPU", memory_bytes, float("inf"), GPU_BASE_BYTES)


def unlimited(*, on_cpu: bool) -> Device:
    """A device that everything fits into, for the comparison with a finished run."""
    return Device("any", float("inf"), float("inf"), 0.0, on_cpu)


def this_machine(engine: str, processes: int) -> Device:
    """This machine with so many processes. What each takes at first is measured, in a process of its own."""
    import psutil

    command = [sys.executable, "-W", "ignore", "-c", _MEASURE, engine]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    base, gpu_bytes = json.loads(finished.stdout.splitlines()[-1])
    memory = psutil.virtual_memory().total
    if gpu_bytes is None:
        return Device(THIS_MACHINE, memory / processes, float("inf"), base, on_cpu=True)
    import torch

    host_share = memory / min(processes, torch.cuda.device_count())
    return Device(THIS_MACHINE, gpu_bytes, host_share, base)

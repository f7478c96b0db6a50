"""The memory of one device: this machine's, or that of GPUs of a given size."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsframe.engines import TABLE
from dsframe.run_dir.record import read_summary
from dsframe.tools import subprocess_runs

GPU_BASE_BYTES = 0.6e9
"""What CUDA's context and NCCL's buffers take of a GPU that is not here: an assumption."""
_TINY: dict[str, Any] = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "dsframe": {
        "task": {
            "name": "language",
            "layers": 1,
            "heads": 1,
            "width": 8,
            "context": 8,
            "corpus": "synthetic",
            "samples": 8,
        },
        "steps": 2,
        "eval_every_steps": 1,
        "checkpoints": {"every_steps": 1},
    },
}
"""A training whose model takes nothing: what it takes is the process's."""


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


def this_machine(engine: str, processes: int) -> Device:
    """This machine with so many processes. What each takes is measured in a training of two steps;
    of a GPU, what it has in use when CUDA has started."""
    import psutil
    import torch

    memory = psutil.virtual_memory().total
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        host = memory / min(processes, torch.cuda.device_count())
        return Device("this machine", total, host, total - free, measured=True)
    package = TABLE[engine].package
    installed = package is None or importlib.util.find_spec(package) is not None
    with tempfile.TemporaryDirectory() as folder:
        path, run = Path(folder, "tiny.json"), Path(folder, "run")
        path.write_text(json.dumps(_TINY), encoding="utf-8")
        words = ["--engine", engine if installed else "auto"]
        subprocess_runs.train(path, min(processes, 2), run, words=words)
        base = max(read_summary(run)["peak_memory_bytes"])
    return Device("this machine", memory / processes, base_bytes=base, on_cpu=True, measured=True)

"""What one file's run takes of each rank: bytes held, bytes sent, seconds. Arithmetic over a traced model; nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsframe.config import Batch, Config
from dsframe.tools.plan.case import Case, cut, elements
from dsframe.tools.plan.footprint import Memory, footprint
from dsframe.tools.plan.hardware import Hardware
from dsframe.tools.plan.model import Model
from dsframe.tools.plan.timing import Seconds, seconds, sent

MARGIN = 0.1
"""Of a device's memory: what half of the predictions are off by, at most (``make predictions``)."""


@dataclass(frozen=True)
class Prediction:
    """One file on one number of processes. Memory is that of the pipeline stage that needs most."""

    engine: str
    world_size: int
    batch: Batch
    stages: int
    memory: Memory
    sent: Mapping[str, float]
    """Bytes that a rank sends in a step, by what for."""
    seconds: Seconds
    flops: float
    """Of the model for one step, all ranks together, nothing counted twice."""
    fits: bool
    fullness: float
    """Of the device's memory or of the host's, whichever is fuller; above 1 it does not fit."""
    tight: bool
    """Fits with less to spare than predictions are off by (``MARGIN``)."""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.batch.train_batch_size / self.seconds.step

    def to_json(self) -> dict[str, Any]:
        """Plain numbers: bytes, seconds, samples."""
        memory, time = self.memory, self.seconds
        return {
            "engine": self.engine,
            "world_size": self.world_size,
            "data_parallel_size": self.batch.data_parallel_size,
            "tensor_parallel_size": self.batch.tensor_parallel_size,
            "pipeline_stages": self.stages,
            "train_batch_size": self.batch.train_batch_size,
            "micro_batch_size": self.batch.micro_batch_size,
            "accumulation_steps": self.batch.accumulation_steps,
            "memory_bytes": vars(memory) | {"states": memory.states, "total": memory.total, "peak": memory.peak},
            "sent_bytes_per_step": dict(self.sent),
            "seconds_per_step": vars(time) | {"step": time.step},
            "samples_per_second": self.rate,
            "flops_per_step": self.flops,
            "fits": self.fits,
            "tight": self.tight,
        }


def predict(
    config: Config, engine: str, model: Model, hardware: Hardware, world_size: int, *, seconds_each: float | None = None
) -> Prediction:
    """``seconds_each``: known time of one sample on one device; default: as ``hardware`` knows it.

    Raises ConfigError where the batch cannot be cut so.
    """
    if seconds_each is None:
        seconds_each = hardware.known.get(model.key)
    case = Case.of(config, engine, model, hardware, world_size, seconds_each)
    cuts = cut(model.segments, case.stages)
    held = max((footprint(case, part, number) for number, part in enumerate(cuts)), key=lambda memory: memory.peak)
    device, host = held.peak / hardware.memory_bytes, held.host_peak / hardware.host_memory_bytes
    return Prediction(
        engine,
        world_size,
        case.batch,
        case.stages,
        held,
        sent(case, max(cuts, key=elements)),
        seconds(case, cuts),
        model.flops(case.rows) * case.steps * case.batch.data_parallel_size,
        max(device, host) <= 1,
        max(device, host),
        1 - MARGIN < device <= 1 and host <= 1,
    )

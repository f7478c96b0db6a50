"""What one file's run takes of each rank: bytes held, bytes sent. Arithmetic over a traced model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsframe.config import Batch, Config
from dsframe.tools.plan.case import Case, cut, elements, with_frozen
from dsframe.tools.plan.device import Device
from dsframe.tools.plan.footprint import Memory, footprint
from dsframe.tools.plan.model import Model, Segment

MARGIN = 0.1
"""Of a device's memory: what half of the predictions are off by, at most (``make predictions``)."""


@dataclass(frozen=True)
class Prediction:
    """One file on one number of processes. Memory is that of the pipeline stage that needs most."""

    engine: str
    batch: Batch
    stages: int
    memory: Memory
    sent: Mapping[str, float]
    """Bytes that a rank sends in a step, by what for."""
    flops: float
    """Of the model for one step, all ranks together, nothing counted twice."""
    fullness: float
    """Of the device's memory or of the host's, whichever is fuller; above 1 it does not fit."""

    @property
    def fits(self) -> bool:
        return self.fullness <= 1

    @property
    def tight(self) -> bool:
        """True if it fits with less to spare than predictions are off by (``MARGIN``)."""
        return 1 - MARGIN < self.fullness <= 1

    def to_json(self) -> dict[str, Any]:
        """Plain numbers: bytes, samples."""
        memory, batch = self.memory, self.batch
        return {
            "engine": self.engine,
            "data_parallel_size": batch.data_parallel_size,
            "tensor_parallel_size": batch.tensor_parallel_size,
            "pipeline_stages": self.stages,
            "train_batch_size": batch.train_batch_size,
            "micro_batch_size": batch.micro_batch_size,
            "accumulation_steps": batch.accumulation_steps,
            "memory_bytes": vars(memory) | {"states": memory.states, "total": memory.total},
            "sent_bytes_per_step": dict(self.sent),
            "flops_per_step": self.flops,
            "fits": self.fits,
            "tight": self.tight,
        }


def predict(config: Config, engine: str, model: Model, device: Device, world_size: int) -> Prediction:
    """Raises ConfigError where the batch cannot be divided so."""
    case = Case.of(config, engine, model, device, world_size)
    parts = cut(model.segments, case.stages)
    stages = [footprint(case, part, number) for number, part in enumerate(parts)]
    memory = max(stages, key=lambda stage: stage.total)
    sent = sent_bytes(case, max(parts, key=elements))
    tied = sum(segment.shared for part in parts for segment in part) / case.tensor
    if tied:  # all-reduced between two stages: each sends it once
        sent["tied weights"] = tied * case.gradient_bytes
    return Prediction(
        engine,
        case.batch,
        case.stages,
        memory,
        sent,
        model.flops(case.rows) * case.steps * case.batch.data_parallel_size,
        max(memory.total / device.memory_bytes, memory.host / device.host_memory_bytes),
    )


def sent_bytes(case: Case, part: Sequence[Segment]) -> dict[str, float]:
    """Bytes that a rank of this stage sends in one step, by what for, in rings."""
    ring = (case.data - 1) / case.data
    trained = elements(part) / case.tensor
    held = with_frozen(part) / case.tensor if case.zero == 3 else trained
    weights = ring * held * case.model.bytes_each
    gradients = ring * trained * case.gradient_bytes * case.reductions
    result: dict[str, float] = {}
    if case.data > 1:
        scattered = case.zero == 3 or case.costs.scatters
        result["gradients"] = gradients if scattered else 2 * gradients
        if case.zero:
            result["parameters"] = weights * (case.gathers(held) if case.zero == 3 else 1)
    if case.tensor > 1:
        # Two all-reduces for each pass through a block (Shoeybi et al. 2019, arXiv 1909.08053).
        outputs = sum(segment.output.at(case.rows) * segment.attentions for segment in part)
        reduced = 2 * case.passes * outputs * case.steps
        result["tensor parallel"] = 2 * (case.tensor - 1) / case.tensor * reduced
    if case.sequence > 1:
        # Queries, keys, values and what comes of them, in each pass (Jacobs et al. 2023, arXiv
        # 2309.14509). Fewer key heads, of which less is sent, are counted as if they were as many.
        exchanged = sum(case.at(segment.output) * segment.attentions for segment in part)
        exchanged *= 4 * case.passes * case.steps
        result["sequence parallel"] = (case.sequence - 1) / case.sequence * exchanged
    if case.stages > 1 and part:
        result["pipeline"] = part[-1].output.at(case.rows) * case.steps
    return result

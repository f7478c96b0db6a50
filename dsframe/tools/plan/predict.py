"""What one file's run takes of each rank: bytes held, bytes sent. Arithmetic over a traced model; nothing is run."""

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
    world_size: int
    batch: Batch
    stages: int
    memory: Memory
    sent: Mapping[str, float]
    """Bytes that a rank sends in a step, by what for."""
    flops: float
    """Of the model for one step, all ranks together, nothing counted twice."""
    fits: bool
    fullness: float
    """Of the device's memory or of the host's, whichever is fuller; above 1 it does not fit."""
    tight: bool
    """Fits with less to spare than predictions are off by (``MARGIN``)."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers: bytes, samples."""
        memory = self.memory
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
            "flops_per_step": self.flops,
            "fits": self.fits,
            "tight": self.tight,
        }


def predict(config: Config, engine: str, model: Model, device: Device, world_size: int) -> Prediction:
    """Raises ConfigError where the batch cannot be cut so."""
    case = Case.of(config, engine, model, device, world_size)
    cuts = cut(model.segments, case.stages)
    stages = (footprint(case, part, number) for number, part in enumerate(cuts))
    memory = max(stages, key=lambda stage: stage.peak)
    on_device = memory.peak / device.memory_bytes
    on_host = memory.host_peak / device.host_memory_bytes
    return Prediction(
        engine,
        world_size,
        case.batch,
        case.stages,
        memory,
        sent_bytes(case, max(cuts, key=elements)),
        model.flops(case.rows) * case.steps * case.batch.data_parallel_size,
        max(on_device, on_host) <= 1,
        max(on_device, on_host),
        1 - MARGIN < on_device <= 1 and on_host <= 1,
    )


def sent_bytes(case: Case, part: Sequence[Segment]) -> dict[str, float]:
    """Bytes that a rank of this stage sends in one step, by what for, in rings.

    DeepSpeed 0.19.8 all-reduces gradients at stages 1 and 2 (``use_multi_rank_bucket_allreduce``), where the paper
    scatters.
    """
    ring = (case.data - 1) / case.data
    trained = elements(part) / case.tensor
    whole = with_frozen(part) / case.tensor if case.zero == 3 else trained
    weights = ring * whole * case.model.bytes_each
    gradients = ring * trained * case.gradient_bytes
    result: dict[str, float] = {}
    if case.data > 1 and case.zero == 3:
        result["parameters"] = case.gathers(whole) * weights
        result["gradients"] = gradients * case.reductions
    elif case.data > 1:
        result["gradients"] = (1 if case.costs.scatters else 2) * gradients * case.reductions
        if case.zero:
            result["parameters"] = weights
    if case.tensor > 1:
        # Two all-reduces for each pass through a block (Shoeybi et al. 2019, arXiv 1909.08053).
        reduced = sum(s.output.at(case.rows) * s.attentions for s in part) * 2 * case.passes
        result["tensor parallel"] = 2 * (case.tensor - 1) / case.tensor * reduced * case.steps
    if case.sequence > 1:
        # Queries, keys, values and what comes of them, in each pass (Jacobs et al. 2023, arXiv 2309.14509). Fewer key
        # heads, of which less is sent, are counted as if they were as many.
        exchanged = 4 * case.passes * sum(case.at(segment.output) * segment.attentions for segment in part)
        result["sequence parallel"] = (case.sequence - 1) / case.sequence * exchanged * case.steps
    if case.stages > 1 and part:
        result["pipeline"] = part[-1].output.at(case.rows) * case.steps
    tied = sum(segment.shared + segment.lent for segment in part) / case.tensor * case.gradient_bytes
    if tied:  # all-reduced between two stages: each sends it once
        result["tied weights"] = tied
    return result

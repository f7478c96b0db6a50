"""Bytes that one rank holds at its fullest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsframe.plan.case import Case, elements
from dsframe.plan.model import Segment

HEAP_HOLES = 0.25
"""On a CPU the heap keeps holes between tensors that come and go: so much of the activations on top (glibc 2.36, measured:
a GPT of 3 million parameters, 141 MB of activations)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Buckets of collectives, gathered parameters, an operation's results."""
    reserved: float
    """Taken before the first tensor is made."""
    host: float = 0.0
    """Beside the device: in the memory of its host."""

    @property
    def states(self) -> float:
        """What lasts from step to step: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.buffers + self.reserved


def footprint(case: Case, part: Sequence[Segment], number: int) -> Memory:
    """Of a rank of pipeline stage ``number``, which holds ``part`` of the model."""
    last = number == case.stages - 1
    own = elements(part) if case.stages > 1 else sum(segment.parameters for segment in part)
    trained, cost, width = own / case.tensor, case.cost, case.model.bytes_each
    frozen = sum(segment.frozen for segment in part) / case.tensor / (case.data if case.zero == 3 else 1)
    activations = _activations(case, part, number, last)
    return Memory(
        parameters=cost.parameter * trained + frozen * width,
        gradients=cost.gradient * trained,
        optimizer=cost.optimizer * trained,
        activations=activations,
        buffers=_buffers(case, part, trained, last)
        + max(0.0, _update(case, trained) - activations)
        + (HEAP_HOLES * activations if case.hardware.lazy_memory else 0.0),
        reserved=case.hardware.reserved_bytes,
        host=cost.host * trained,
    )


def _activations(case: Case, part: Sequence[Segment], number: int, last: bool) -> float:
    under_way = min(case.stages - number, case.steps)  # micro-batches whose backward pass is still to come (1F1B)

    def kept(segment: Segment) -> float:
        wide = segment.saved_wide.at(case.rows)
        return wide + (segment.saved.at(case.rows) - wide) / case.tensor

    if case.checkpointed:
        own = under_way * sum(s.output.at(case.rows) for s in part) + max((kept(s) for s in part), default=0.0)
    else:
        own = under_way * sum(kept(segment) for segment in part)
    if last:
        own += case.model.loss.saved.at(case.rows)
    return own + under_way * case.model.inputs.at(case.rows)


def _buffers(case: Case, part: Sequence[Segment], trained: float, last: bool) -> float:
    zero, width = case.file.zero_optimization, case.model.bytes_each
    segments = [*part, *([case.model.loss] if last else [])]
    size = max((segment.scratch.at(case.rows) for segment in segments), default=0.0)
    size += sum(segment.buffer_bytes for segment in part)
    if case.engine == "horovod" and case.data > 1:
        size += min(case.bucket_bytes, 4 * trained)
    if case.zero and not case.replicas and zero.contiguous_gradients:
        bucket = float(zero.reduce_bucket_size)
        if case.hardware.lazy_memory:  # pages that nothing is written to do not exist
            bucket = min(bucket, trained)
        size += bucket * width * (2 if zero.overlap_comm and case.zero < 3 else 1)
        # Stages 1 and 2 flatten a copy to all-reduce (stage_1_and_2.py: allreduce_bucket).
        if case.zero < 3 and case.data > 1:
            size += min(zero.reduce_bucket_size, trained) * case.gradient_bytes
    if case.zero == 3 and case.data > 1:
        unit = max((s.parameters if case.model.layered else s.largest for s in part), default=0)
        live = zero.stage3_max_live_parameters if case.engine == "deepspeed" else 2 * unit
        size += min(trained, max(live, unit)) * width
    return size


def _update(case: Case, trained: float) -> float:
    """At the step, when no activations are left, ZeRO copies the partition's gradients to fp32."""
    offloaded = case.file.zero_optimization.optimizer_device != "none"
    return 4 * trained / case.data if case.zero and not case.replicas and not offloaded else 0.0

"""Bytes that one rank holds at its fullest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsframe.model.build import LARGE
from dsframe.tools.plan.case import Case, elements, with_frozen
from dsframe.tools.plan.model import Segment

HEAP_HOLES = 0.25
"""On a CPU the heap keeps holes between tensors that come and go: so much of the activations on top
(glibc 2.36, measured: a GPT of 3 million parameters, 141 MB of activations)."""
HEAP_HOLES_OF_STAGES = 1.0
"""The same in a pipeline, where one micro-batch's activations are made while another's are given up
(measured likewise: 0.98 in the first of two stages of a GPT of 19 million parameters)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Buckets of collectives, gathered parameters, an operation's results."""
    base: float
    """Taken before the first tensor is made."""
    host: float = 0.0
    """In the memory of the device's host, while the model is built or in a step."""

    @property
    def states(self) -> float:
        """What lasts from step to step: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """On the device at its fullest moment."""
        return self.states + self.activations + self.buffers + self.base


def footprint(case: Case, part: Sequence[Segment], number: int) -> Memory:
    """Of a rank of pipeline stage ``number``, which holds ``part`` of the model."""
    last, on_cpu = number == case.stages - 1, case.device.on_cpu
    trained, cost, width = elements(part) / case.tensor, case.cost, case.model.bytes_each
    frozen = sum(segment.frozen for segment in part) / case.tensor
    frozen /= case.data if case.zero == 3 else 1
    under_way = min(case.stages - number, case.steps)  # their backward pass is still to come (1F1B)
    training = _activations(case, part, under_way, last=last)
    activations = max(training, _evaluation(case, part, last=last))
    # On a GPU the memory of activations is free for others when they are gone.
    update = _update(case, trained) - (0.0 if on_cpu else activations)
    kept = trained * width if case.kept and case.data > 1 else 0.0
    gathered = _gathered(case, part, trained) - kept if case.zero == 3 else 0.0
    buffers = _buffers(case, part, trained, last=last) + gathered + max(_reduced(case, trained), update)
    if case.tensor > 1 and _in_files(case):  # AutoTP shards whole weights, on the device
        buffers = max(buffers, elements(part) * width)
    # A save in the background copies a rank's shard of weights and moments, in fp32.
    saves = case.settings.checkpoints.asynchronous
    saving = 4.0 * (1 + case.costs.moments) * trained / case.data if saves else 0.0
    host = cost.host * trained + saving
    if case.fetches and case.file.zero_optimization.parameter_device != "nvme":
        host += frozen * width
    host += under_way * sum(case.at(segment.offloaded) for segment in part) / case.tensor
    built = 0.0 if _in_files(case) else 4.0 * case.tensor * (trained + frozen)  # in fp32, whole
    return Memory(
        parameters=cost.parameter * (trained - _elsewhere(case, part, 3))
        + (0.0 if case.fetches else frozen * width)
        + kept,
        gradients=cost.gradient * (trained - _elsewhere(case, part, 2)),
        # Offloaded or not: a CPU has one memory.
        optimizer=(cost.optimizer + (cost.host if on_cpu else 0.0)) * (trained - _elsewhere(case, part, 1)),
        activations=activations,
        buffers=buffers + (saving + _heap(case, trained, training) if on_cpu else 0.0),
        base=case.device.base_bytes,
        host=0.0 if on_cpu else max(host, built),
    )


def _elsewhere(case: Case, part: Sequence[Segment], stage: int) -> float:
    """Elements of experts that other ranks hold of what ZeRO shards from ``stage`` on. Sharded, a
    rank's part is as large without: it shards its own experts among fewer ranks."""
    share = 0.0 if case.zero >= stage else 1 - 1 / case.experts
    return share * sum(segment.experts for segment in part)


def _in_files(case: Case) -> bool:
    return case.costs.builds_in_files(case.data)


def _gives_back(case: Case) -> bool:
    """True if freed memory goes back to the system (``dsframe.engine.build_model``)."""
    return _in_files(case) and case.data > 1 and case.model.parameters + case.model.frozen > LARGE


def _heap(case: Case, trained: float, activations: float) -> float:
    """What a CPU's process holds and no longer uses: holes of the heap, or the weights as they were
    built, whole, before DeepSpeed moved them."""
    if _gives_back(case):
        return 0.0
    holes = (HEAP_HOLES if case.stages == 1 else HEAP_HOLES_OF_STAGES) * activations
    if case.costs.flattens and not _in_files(case):
        holes = max(holes, trained * case.tensor * case.model.bytes_each)
    return holes


def _activations(case: Case, part: Sequence[Segment], under_way: int, *, last: bool) -> float:
    def kept(segment: Segment) -> float:
        wide = case.at(segment.saved_wide)
        here = case.at(segment.offloaded) if case.device.on_cpu else 0.0
        return wide + (case.at(segment.saved) - wide + here) / case.tensor

    if case.stages > 1 and case.file.pipeline.activation_checkpoint_interval:
        held = under_way * sum(case.at(segment.output) for segment in part)
        held += max(map(kept, part), default=0.0)
    else:
        held = under_way * sum(map(kept, part))
        held += max((case.at(segment.transient) for segment in part), default=0.0) / case.tensor
    held += case.at(case.model.loss.saved) if last else 0.0
    return held + under_way * case.model.inputs.at(case.rows)  # each rank reads whole sequences


def _evaluation(case: Case, part: Sequence[Segment], *, last: bool) -> float:
    """Evaluation keeps nothing for a backward pass, but its batches may be larger
    (``eval_micro_batch_size``): what the largest operation reads and writes."""
    rows = case.settings.eval_micro_batch_size or case.rows
    segments = [*part, *([case.model.loss] if last else [])]
    largest = max((2 * segment.scratch.at(rows) for segment in segments), default=0.0)
    return largest / case.tensor / case.sequence


def _buffers(case: Case, part: Sequence[Segment], trained: float, *, last: bool) -> float:
    zero, width = case.file.zero_optimization, case.model.bytes_each
    segments = [*part, *([case.model.loss] if last else [])]
    size = max((case.at(segment.scratch) for segment in segments), default=0.0)
    size += sum(segment.buffer_bytes for segment in part)
    if case.data > 1:
        size += case.costs.bucket_bytes(trained, width, case.steps)
    if case.costs.flattens and zero.contiguous_gradients:
        bucket = float(_bucket_elements(case))
        if case.device.on_cpu:  # pages that nothing is written to do not exist
            bucket = min(bucket, trained)
        size += bucket * width * (2 if zero.overlap_comm and case.zero < 3 else 1)
        if case.zero == 1:  # gradients that fit lie in the bucket
            size -= min(bucket, trained) * width
    return size


def _bucket_elements(case: Case) -> int:
    zero = case.file.zero_optimization
    return zero.bucket_elements(case.model.parameters, on_cpu=case.device.on_cpu)


def _gathered(case: Case, part: Sequence[Segment], trained: float) -> float:
    """Whole parameters of a model that is sharded, or lies on the host, and what comes with them."""
    zero, width = case.file.zero_optimization, case.model.bytes_each
    if case.costs.gathers_blocks:
        if case.data == 1:
            return 0.0
        # A CPU's heap keeps of every block what was gathered, its copy, and both of its gradients.
        if case.device.on_cpu and not _gives_back(case):
            return trained * (3 * width + 4)
        # The next unit is on its way while one computes; gradients of one are whole, then in fp32.
        return min(trained, 2 * case.unit(part)) * (width + 4)
    unit = case.fetched(part)
    held = with_frozen(part) / case.tensor
    live = min(held, max(zero.stage3_max_live_parameters, unit)) * width
    if case.data == 1:  # nothing to gather, but what lies on the host is copied (NoGatherHandle)
        return live if case.fetches else 0.0
    # What is fetched ahead is there twice (partition_parameters.py: AllGatherCoalescedHandle).
    return live + min(held, max(zero.stage3_prefetch_bucket_size, unit)) * width


def _reduced(case: Case, trained: float) -> float:
    """The flat copy of its bucket that ZeRO sends (stage_1_and_2.py: allreduce_bucket; stage3.py:
    reduce_scatter_coalesced). Gloo makes an all-reduce of a reduce-scatter, in one more copy."""
    if not case.costs.flattens:
        return 0.0
    copies = 2 if case.zero == 3 and case.data > 1 and case.device.on_cpu else 1
    return copies * min(_bucket_elements(case), trained) * case.gradient_bytes


def _update(case: Case, trained: float) -> float:
    """At the step ZeRO makes its shard's gradients flat, and then fp32 (stage_1_and_2.py, stage3.py:
    step)."""
    offloaded = case.file.zero_optimization.optimizer_device != "none"
    width = case.model.bytes_each
    each = width + (4 if width < 4 else 0)
    return each * trained / case.data if case.costs.flattens and not offloaded else 0.0

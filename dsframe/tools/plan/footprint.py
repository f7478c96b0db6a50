"""Bytes that one rank holds at its fullest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsframe.model.build import LARGE
from dsframe.tools.plan.case import Case, elements, with_frozen
from dsframe.tools.plan.model import Segment

HEAP_HOLES = 0.25
"""On a CPU the heap keeps holes between tensors that come and go: so much of the activations on top (glibc 2.36, measured:
a GPT of 3 million parameters, 141 MB of activations)."""
HEAP_HOLES_OF_STAGES = 1.0
"""The same in a pipeline, where one micro-batch's activations are made while another's are given up (measured likewise: 0.98 in
the first of two stages of a GPT of 19 million parameters)."""


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
    """Beside the device: in the memory of its host."""
    setup: float = 0.0
    """On the device at the fullest moment of the set-up, ``base`` included."""
    setup_host: float = 0.0
    """Beside the device at that time. Pages of files are not counted: the system takes them back when it needs them."""
    disk: float = 0.0
    """Files in which a model is built that is sharded; gone when the set-up ends."""

    @property
    def states(self) -> float:
        """What lasts from step to step: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """On the device at the fullest moment of a step."""
        return self.states + self.activations + self.buffers + self.base

    @property
    def peak(self) -> float:
        """On the device, at the fullest moment of the run."""
        return max(self.total, self.setup)

    @property
    def host_peak(self) -> float:
        """Beside the device."""
        return max(self.host, self.setup_host)


def footprint(case: Case, part: Sequence[Segment], number: int) -> Memory:
    """Of a rank of pipeline stage ``number``, which holds ``part`` of the model."""
    last = number == case.stages - 1
    trained, cost, width = elements(part) / case.tensor, case.cost, case.model.bytes_each
    frozen = sum(segment.frozen for segment in part) / case.tensor / (case.data if case.zero == 3 else 1)
    training = _activations(case, part, number, last)
    activations = max(training, _evaluation(case, part, last))
    on_cpu = case.device.on_cpu
    # On a GPU the memory of activations is free for others when they are gone.
    moving = max(_reduced(case, trained), _update(case, trained) - (0.0 if on_cpu else activations))
    # Beside its share, and gathered like the rest: what _gathered counts as fetched ahead is then the collective's buffer.
    kept = trained * width if case.kept and case.data > 1 else 0.0
    return Memory(
        parameters=cost.parameter * (trained - _elsewhere(case, part, 3))
        + (0.0 if case.fetches else frozen * width)
        + kept,
        gradients=cost.gradient * (trained - _elsewhere(case, part, 2)),
        # Offloaded or not: there is one memory.
        optimizer=(cost.optimizer + (cost.host if on_cpu else 0.0)) * (trained - _elsewhere(case, part, 1)),
        activations=activations,
        buffers=_buffers(case, part, trained, last)
        - kept
        + moving
        + (_heap(case, trained, training) + _saving(case, trained) if on_cpu else 0.0),
        base=case.device.base_bytes,
        host=0.0
        if on_cpu
        else cost.host * trained
        + (frozen * width if case.fetches and not case.on_disk else 0.0)
        + _away(case, part, number)
        + _saving(case, trained),
        **_set_up(case, part, trained, frozen),
    )


def _elsewhere(case: Case, part: Sequence[Segment], stage: int) -> float:
    """Elements of experts that other ranks hold of what ZeRO shards from ``stage`` on; sharded, a rank's part is the same with and
    without: it shards its own experts among fewer ranks."""
    return (0.0 if case.zero >= stage else 1 - 1 / case.experts) * sum(segment.experts for segment in part)


def _set_up(case: Case, part: Sequence[Segment], trained: float, frozen: float) -> dict[str, float]:
    """What building the model takes (:meth:`Costs.setup`), with one layer's whole weights and their copy where it is sharded."""
    cost, on_cpu = case.cost, case.device.on_cpu
    found = case.costs.setup(cost, case.data, case.tensor, on_cpu=on_cpu)
    one = 4 * (case.block(part) if case.costs.gathers_blocks and not on_cpu else case.fetched(part))
    in_memory = on_cpu and _in_files(case) and case.data > 1  # frozen parameters too are drawn in fp32
    own = found.device * trained + (0.0 if case.fetches else frozen * (4.0 if in_memory else case.model.bytes_each))
    return {
        "setup": own + (2 * one if _in_files(case) else 0.0) + case.device.base_bytes,
        "setup_host": 0.0 if on_cpu else found.host * trained + (one if _in_files(case) else 4.0 * frozen),
        "disk": found.disk * trained + (4.0 * frozen if _in_files(case) else 0.0),
    }


def _saving(case: Case, trained: float) -> float:
    """A rank's share of weights and moments once more, in fp32, where saves copy it and write it while training goes on."""
    return 4.0 * (1 + case.costs.moments) * trained / case.data if case.settings.checkpoints.asynchronous else 0.0


def _heap(case: Case, trained: float, activations: float) -> float:
    """What a CPU's process holds and no longer uses, at its fullest.

    Blocks below 32 MiB come from one heap, which gives nothing back (``dsframe.host.memory``) and is soon full of
    holes, so that it has room for everything small that a step makes, though not at the same time: activations
    beside the gradients that replace them, and, where parameters lie in shares, each layer's gathered weights and whole gradients.
    A large model whose parameters are sharded gives them back.
    """
    if _gives_back(case):
        return 0.0
    holes = (HEAP_HOLES if case.stages == 1 else HEAP_HOLES_OF_STAGES) * activations
    if case.costs.flattens and not _in_files(
        case
    ):  # the weights as they were built, whole, before DeepSpeed moved them
        holes = max(holes, trained * case.tensor * case.model.bytes_each)
    return holes


def _in_files(case: Case) -> bool:
    """True if the model is built in files, from which each rank takes its shards (``dsframe.model.spill``)."""
    return case.costs.builds_in_files(case.data)


def _gives_back(case: Case) -> bool:
    """True if freed memory goes back to the system (``dsframe.engine.build_model``)."""
    return _in_files(case) and case.data > 1 and case.model.parameters + case.model.frozen > LARGE


def _activations(case: Case, part: Sequence[Segment], number: int, last: bool) -> float:
    under_way = min(case.stages - number, case.steps)  # micro-batches whose backward pass is still to come (1F1B)

    def kept(segment: Segment) -> float:
        wide = case.at(segment.saved_wide)
        here = case.at(segment.away) if case.device.on_cpu else 0.0
        return wide + (case.at(segment.saved) - wide + here) / case.tensor

    if any(segment.switched for segment in part):
        own = under_way * sum(map(kept, part)) + max(case.at(s.transient) for s in part) / case.tensor
    elif case.checkpointed:
        own = under_way * sum(case.at(s.output) for s in part) + max((kept(s) for s in part), default=0.0)
    else:
        own = under_way * sum(kept(segment) for segment in part)
    if last:
        own += case.at(case.model.loss.saved)
    return own + under_way * case.model.inputs.at(case.rows)  # each rank reads whole sequences


def _away(case: Case, part: Sequence[Segment], number: int) -> float:
    """Activations that wait on the host; where its memory is the device's they stay."""
    return min(case.stages - number, case.steps) * sum(case.at(s.away) for s in part) / case.tensor


def _evaluation(case: Case, part: Sequence[Segment], last: bool) -> float:
    """Evaluation keeps nothing for a backward pass, but its batches may be larger (``eval_micro_batch_size``): what the operation
    with the most reads and writes of it."""
    rows = case.settings.eval_micro_batch_size or case.rows
    segments = [*part, *([case.model.loss] if last else [])]

    def most(segment: Segment) -> float:
        if segment.sliced:
            return 2 * segment.scratch.at(rows)
        return segment.moved * rows

    return max(map(most, segments), default=0.0) / case.tensor / case.sequence


def _buffers(case: Case, part: Sequence[Segment], trained: float, last: bool) -> float:
    zero, width = case.file.zero_optimization, case.model.bytes_each
    segments = [*part, *([case.model.loss] if last else [])]
    size = max((case.at(segment.scratch) for segment in segments), default=0.0)
    size += sum(segment.buffer_bytes for segment in part)
    if case.costs.copies_buckets and case.data > 1:
        size += min(case.bucket_bytes * 4 / case.gradient_bytes, 4 * trained)  # not rounded yet
    if case.costs.copies_gradients(case.steps) and case.data > 1:
        size += trained * width
    if case.costs.flattens and zero.contiguous_gradients:
        bucket = float(case.zero_bucket)
        if case.device.on_cpu:  # pages that nothing is written to do not exist
            bucket = min(bucket, trained)
        size += bucket * width * (2 if zero.overlap_comm and case.zero < 3 else 1)
        if case.zero == 1:  # gradients that fit lie in the bucket
            size -= min(bucket, trained) * width
    return size + (_gathered(case, part, trained) if case.zero == 3 else 0.0)


def _gathered(case: Case, part: Sequence[Segment], trained: float) -> float:
    """Whole parameters of a model that lies in shares, or on the host, and what comes with them."""
    zero, width = case.file.zero_optimization, case.model.bytes_each
    if case.costs.gathers_blocks:
        if case.data == 1:
            return 0.0
        # The next unit is on its way while one computes (or, on CPUs, a gathered one's copy), and gradients of one are whole and
        # once more in fp32, to be sent.
        # A CPU's heap keeps of every block what was gathered, its copy in its place, and both of its gradients (see _heap).
        if case.device.on_cpu and not _gives_back(case):
            return trained * (3 * width + 4)
        return min(trained, 2 * case.unit(part)) * (width + 4)
    unit = case.fetched(part)
    held = with_frozen(part) / case.tensor
    live = min(held, max(zero.stage3_max_live_parameters, unit)) * width
    if case.data == 1:  # nothing to gather, but what lies on the host is copied (NoGatherHandle)
        return live if case.fetches else 0.0
    # Gathered; and what is fetched ahead once more, by the ranks' shares (partition_parameters.py: AllGatherCoalescedHandle).
    ahead = max(zero.stage3_prefetch_bucket_size, unit)
    return live + min(held, ahead) * width


def _reduced(case: Case, trained: float) -> float:
    """The flat copy of its bucket that ZeRO sends (stage_1_and_2.py: allreduce_bucket; stage3.py: reduce_scatter_coalesced), one
    process or many. Gloo makes an all-reduce of a reduce-scatter, in one more copy."""
    if not case.costs.flattens:
        return 0.0
    copies = 2 if case.zero == 3 and case.data > 1 and case.device.on_cpu else 1
    return copies * min(case.zero_bucket, trained) * case.gradient_bytes


def _update(case: Case, trained: float) -> float:
    """At the step ZeRO makes its partition's gradients flat, and then fp32 (stage_1_and_2.py, stage3.py: step)."""
    offloaded = case.file.zero_optimization.optimizer_device != "none"
    each = case.model.bytes_each + (4 if case.model.bytes_each < 4 else 0)
    return each * trained / case.data if case.costs.flattens and not offloaded else 0.0

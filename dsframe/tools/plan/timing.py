"""Bytes that one rank sends in a step, and the seconds of a step.

A roofline for every operation, a ring with latency and bandwidth for every collective, and, where a library exchanges gradients
during the backward pass, a simulation of that: a bucket leaves when its last gradient is there and the one before it has left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsframe.config.resolve.memory import moments
from dsframe.host.memory import LARGEST
from dsframe.tools.plan.case import Case, elements, with_frozen
from dsframe.tools.plan.hardware import Group, group
from dsframe.tools.plan.model import Segment, Work


@dataclass(frozen=True)
class Seconds:
    """Of one optimizer step."""

    compute: float
    """Forward and backward passes."""
    waiting: float
    """For collectives, and for parameters from the host, that nothing hides."""
    bubble: float
    """A pipeline's idle time."""
    update: float
    """The optimizer, what offloading moves, and what ZeRO copies."""
    collectives: float
    """What all collectives take, hidden ones too; no part of the sum."""

    @property
    def step(self) -> float:
        return self.compute + self.waiting + self.bubble + self.update


def sent(case: Case, part: Sequence[Segment]) -> dict[str, float]:
    """Bytes that a rank of this stage sends in one step, by what for, in rings.

    DeepSpeed 0.19.8 all-reduces gradients at stages 1 and 2 (``use_multi_rank_bucket_allreduce``), where the paper scatters.
    """
    held, ring = elements(part) / case.tensor, (case.data - 1) / case.data
    whole = with_frozen(part) / case.tensor if case.zero == 3 else held
    weights, gradients = ring * whole * case.model.bytes_each, ring * held * case.gradient_bytes
    result: dict[str, float] = {}
    if case.data > 1 and case.zero == 3:
        result["parameters"] = case.gathers(whole) * weights
        result["gradients"] = gradients * case.reductions
    elif case.data > 1:
        result["gradients"] = (1 if case.costs.scatters else 2) * gradients * case.reductions
        if case.zero:
            result["parameters"] = weights
    if case.tensor > 1:
        reduced = sum(s.output.at(case.rows) * s.attentions for s in part) * 2 * case.passes
        result["tensor parallel"] = 2 * (case.tensor - 1) / case.tensor * reduced * case.steps
    if case.sequence > 1:
        result["sequence parallel"] = (case.sequence - 1) / case.sequence * _exchanged(case, part) * case.steps
    if case.stages > 1 and part:
        result["pipeline"] = part[-1].output.at(case.rows) * case.steps
    if tied := _tied_bytes(case, part):  # all-reduced between two stages: each sends it once
        result["tied weights"] = tied
    return result


def seconds(case: Case, cuts: Sequence[tuple[Segment, ...]]) -> Seconds:
    """Of a step: the slowest stage computes, the largest one exchanges."""
    numbered = enumerate(cuts, start=1)
    forward, backward = max((_pass_seconds(case, part, number == case.stages) for number, part in numbered), key=sum)
    switched = [segment for part in cuts for segment in part if segment.switched]
    if switched:
        flops = [float(segment.forward.flops(case.rows).sum()) for part in cuts for segment in part]
        again = sum(segment.again * float(segment.forward.flops(case.rows).sum()) for segment in switched)
        backward += forward * again / max(sum(flops), 1.0)
    elif case.checkpointed:
        backward += forward
    part = max(cuts, key=elements)
    waiting, hidden = _data_parallel(case, part, forward, backward)
    waiting += _tensor_parallel(case, part) + _sequence_parallel(case, part) + _between_stages(case, cuts)
    return Seconds(
        compute=case.steps * (forward + backward),
        waiting=waiting + _fetched(case, part, forward, backward),
        bubble=_bubble(case) * (forward + backward),
        update=_update(case, elements(part) / case.tensor) + _copied(case, part),
        collectives=waiting + hidden,
    )


def _bubble(case: Case) -> float:
    """A pipeline's idle time, in passes of a micro-batch. While it fills and drains fewer stages compute, and where they share
    a processor those do it faster: from one at a time, at ``alone_share`` of the seconds, to all."""
    gained = 1.0 - case.hardware.alone_share
    return max(0.0, case.stages - 1 - case.stages * gained)


def _data_parallel(case: Case, part: Sequence[Segment], forward: float, backward: float) -> tuple[float, float]:
    """Seconds of collectives over data-parallel ranks: those that are waited for, and those behind computation."""
    if case.data == 1:
        return 0.0, 0.0
    ranks = group(case.hardware, case.data, case.tensor, case.world_size)
    held = elements(part) / case.tensor
    weights, gradients = held * case.model.bytes_each, held * case.gradient_bytes
    pieces = max(1, math.ceil(gradients / case.bucket_bytes))
    on_cpu = case.hardware.on_cpu  # where what exchanges takes time from what computes: nothing is hidden
    if case.zero == 3:
        layers = len(part) if case.model.layered else max(1, case.model.attentions)
        scatter = ranks.all_reduce if on_cpu else ranks.pass_round  # Gloo's reduce-scatter is an all-reduce
        whole = case.reductions * scatter(gradients, pieces)
        hides = case.costs.overlap(case.model.bytes_each) != "none" and not on_cpu
        # Nothing is computed behind the last layer's gradients.
        ends = scatter(gradients / layers)
        if case.kept:  # the weights come after the update, as one, and nothing hides that
            waiting = max(ends, whole - (case.steps * backward if hides else 0.0))
            return waiting + ranks.pass_round(weights), max(0.0, whole - waiting)
        weights = with_frozen(part) / case.tensor * case.model.bytes_each
        gathering = case.gathers(with_frozen(part) / case.tensor) * ranks.pass_round(weights, layers)
        if case.costs.prefetches:
            whole += gathering
            ends += ranks.pass_round(weights / layers)  # and the first layer waits for its weights
            waiting = max(ends, whole - (case.steps * (forward + backward) if hides else 0.0))
            return waiting, max(0.0, whole - waiting)
        waiting = gathering + max(ends, whole - (case.steps * backward if hides else 0.0))
        return waiting, max(0.0, gathering + whole - waiting)
    whole = ranks.all_reduce(gradients, pieces) * case.reductions
    overlap = "none" if on_cpu else case.costs.overlap(case.model.bytes_each)
    waiting = whole
    if overlap == "buckets":
        waiting = _behind_backward(case, part, ranks, backward)
    elif overlap == "backward":
        waiting = max(0.0, whole - backward * case.reductions)
    after = ranks.pass_round(weights, pieces) if case.zero else 0.0
    return waiting + after, max(0.0, whole - waiting)


def _fetched(case: Case, part: Sequence[Segment], forward: float, backward: float) -> float:
    """Seconds of waiting for parameters that lie on the host. The next ones come while a module computes, where they may."""
    if not case.fetches:
        return 0.0
    held, hardware = with_frozen(part) / case.tensor, case.hardware
    speed = hardware.host_bandwidth * hardware.transfer_share
    moved = case.gathers(held) * held / case.data * case.model.bytes_each / speed
    zero = case.file.zero_optimization
    ahead = zero.stage3_prefetch_bucket_size > 0 and zero.stage3_max_live_parameters > case.fetched(part)
    return max(0.0, moved - case.steps * (forward + backward)) if ahead else moved


def _behind_backward(case: Case, part: Sequence[Segment], ranks: Group, backward: float) -> float:
    """Seconds from the end of the backward pass to the end of the last bucket's all-reduce."""
    now = free = waiting_bytes = 0.0
    rooflines = [_times(case, segment.backward) for segment in reversed(part)]
    own = sum(float(times.sum()) for times in rooflines)
    stretch = backward / own if own else 0.0
    for segment, times in zip(reversed(part), rooflines, strict=True):
        done = np.concatenate([[0.0], np.cumsum(times)]) * stretch
        for operations, count in segment.ready:
            waiting_bytes += count * case.gradient_bytes
            if waiting_bytes >= case.bucket_bytes:
                free = max(free, now + float(done[operations])) + ranks.all_reduce(waiting_bytes)
                waiting_bytes = 0.0
        now += float(done[-1])
    if waiting_bytes:
        free = max(free, now) + ranks.all_reduce(waiting_bytes)
    return max(0.0, free - now)


def _tensor_parallel(case: Case, part: Sequence[Segment]) -> float:
    """Two all-reduces for each pass through a block (Shoeybi et al. 2019, arXiv 1909.08053)."""
    if case.tensor == 1:
        return 0.0
    ranks = group(case.hardware, case.tensor, 1, case.world_size)
    calls = 2 * case.passes * sum(segment.attentions for segment in part)
    size = sum(s.output.at(case.rows) * s.attentions for s in part) * 2 * case.passes
    return (case.steps + case.stages - 1) * ranks.all_reduce(size, calls)


def _exchanged(case: Case, part: Sequence[Segment]) -> float:
    """Bytes of a rank's slices that attention exchanges in a micro-batch: queries, keys, values and what comes of them, each pass
    (Jacobs et al. 2023, arXiv 2309.14509). Fewer key heads, of which less is sent, are counted as if they were as many."""
    return 4 * case.passes * sum(case.at(segment.output) * segment.attentions for segment in part)


def _sequence_parallel(case: Case, part: Sequence[Segment]) -> float:
    """Seconds of these exchanges. In an all-to-all a rank sends what a ring's pass takes around."""
    if case.sequence == 1:
        return 0.0
    ranks = group(case.hardware, case.sequence, 1, case.world_size)
    calls = 4 * case.passes * sum(segment.attentions for segment in part)
    return case.steps * ranks.pass_round(_exchanged(case, part), calls)


def _between_stages(case: Case, cuts: Sequence[tuple[Segment, ...]]) -> float:
    """Activations forward and their gradients back, and at the end those of weights that two stages hold."""
    if case.stages == 1:
        return 0.0
    across = group(case.hardware, case.stages, case.tensor * case.data, case.world_size)
    size = max((part[-1].output.at(case.rows) for part in cuts[:-1] if part), default=0.0)
    tied = max(_tied_bytes(case, part) for part in cuts)
    shared = Group(2, across.latency, across.bandwidth).all_reduce(tied) if tied else 0.0
    return 2 * (case.steps + case.stages - 1) * (across.latency + size / across.bandwidth) + shared


def _tied_bytes(case: Case, part: Sequence[Segment]) -> float:
    """Gradients of weights that a layer of this stage and one of another use."""
    return sum(segment.shared + segment.lent for segment in part) / case.tensor * case.gradient_bytes


def _pass_seconds(case: Case, part: Sequence[Segment], last: bool) -> tuple[float, float]:
    """Forward and backward pass of one micro-batch."""
    segments = [*part, *([case.model.loss] if last else [])]
    forward = sum(_cut(case, segment, segment.forward) for segment in segments)
    backward = sum(_cut(case, segment, segment.backward) for segment in segments)
    if case.seconds_each is None:
        return forward, backward
    everything = [*case.model.segments, case.model.loss]
    roofline = sum(float(_times(case, work).sum()) for s in everything for work in (s.forward, s.backward))
    stretch = case.seconds_each * case.rows / case.sequence / roofline
    return forward * stretch, backward * stretch


def _cut(case: Case, segment: Segment, work: Work) -> float:
    """Seconds of a rank's part: tensor parallelism cuts blocks, which have attention, and of them what ``Work`` says."""
    times = _times(case, work)
    if case.tensor == 1 or not segment.attentions:
        return float(times.sum())
    return float(np.where(work.whole, times, times / case.tensor).sum())


def _times(case: Case, work: Work) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Seconds of each operation (Williams et al. 2009, doi:10.1145/1498765.1498785): computing or moving bytes, the longer."""
    hardware = case.hardware
    peak = (hardware.flops_short if case.model.bytes_each == 2 else hardware.flops_full) * hardware.compute_share
    bandwidth = hardware.memory_bandwidth * hardware.transfer_share
    result: np.ndarray[Any, np.dtype[np.float64]] = np.maximum(
        work.flops(case.rows) / peak, work.moved(case.rows) / bandwidth
    )
    return result / case.sequence


def _copied(case: Case, part: Sequence[Segment]) -> float:
    """Seconds of ZeRO's copies of gradients: into a bucket (not at stage 3), from there into a new flat tensor (Gloo's
    reduce-scatter makes one more), divided and sent, and back; at the step its share becomes flat, in a new tensor, is summed
    for the norm and scaled. At stage 3 each gathered parameter is put together from the ranks' shares. Large tensors get new
    memory each time (``dsframe.host.memory``).
    Source: deepspeed 0.19.8, ``runtime/zero/`` (stage_1_and_2.py, stage3.py: reduce_scatter_coalesced; partition_parameters.py:
    AllGatherCoalescedHandle).

    On CPUs, where what copies takes time from what computes; a GPU does it behind the backward pass.
    """
    if not case.costs.flattens or not case.hardware.on_cpu:
        return 0.0
    hardware, zero, whole = case.hardware, case.file.zero_optimization, with_frozen(part) / case.tensor
    held = elements(part) / case.tensor
    mine, sent = 4.0 * held / case.data, (2 if case.zero == 3 else 1) * held * case.gradient_bytes
    once = 4 if case.zero == 3 and zero.reduce_scatter else 6  # there the bucket is left out on CPUs
    moved = case.reductions * (once * held * case.gradient_bytes + 2 * sent) + 5 * mine
    if case.zero == 3 and not case.kept and case.data > 1:
        moved += 2 * case.gathers(whole) * whole * case.model.bytes_each
    bucket = min(held, zero.reduce_bucket_size) * case.gradient_bytes
    fresh = (case.reductions * sent if bucket >= LARGEST else 0.0) + (mine if mine >= LARGEST else 0.0)
    return moved / (hardware.memory_bandwidth * hardware.transfer_share) + fresh / hardware.fresh_bandwidth


def _update(case: Case, held: float) -> float:
    """The optimizer reads and writes its state; offloaded, on the host, after gradients went there and before weights return."""
    hardware, zero = case.hardware, case.file.zero_optimization
    mine = held / (case.data if case.zero else 1)
    whole = 8.0 + 8.0 * (moments(case.file) + 1)
    if case.costs.flattens and zero.optimizer_device != "none":
        back = 0.0 if case.fetches else case.model.bytes_each  # else they go when they are needed: _fetched
        moved = mine * (4.0 + back) / (hardware.host_bandwidth * hardware.transfer_share)
        return moved + mine * whole / (hardware.host_memory_bandwidth * hardware.transfer_share)
    return mine * whole / (hardware.memory_bandwidth * hardware.transfer_share)

"""What one step of a model computes and keeps, by running it on torch's meta device: shapes without
memory.

Operations and bytes are affine in the number of samples of a micro-batch (weights are there once,
activations once a sample), so two runs, of 2 and of 4 samples, give every size. Layers that are made
by the same function and take the same shapes are run once: a GPT of 96 blocks costs as much as one
of one block.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dsframe.engines import precision
from dsframe.model import loss_head, switches
from dsframe.model.forward import TargetedInputs, call
from dsframe.observe.flops import OperationCounter
from dsframe.observe.meta import Attention, Loss, Stage, stages_of
from dsframe.tasks.meta import example, map_floats, meta_device, with_rows
from dsframe.tasks.task import Task
from dsframe.tools.plan.model import Affine, Model, Segment, autocast

if TYPE_CHECKING:
    from dsframe.config import Config

ROWS = (2, 4)
"""Samples of the two runs. Not 1: BatchNorm refuses a single value."""


def traced(config: Config, task: Task) -> Model:
    """The model in the number formats of a file. Raises TaskError as :func:`trace`."""
    model = trace(task, precision.parameter_dtype(config), config)
    if not config.deepspeed.torch_autocast.enabled:
        return model
    return autocast(model, trace(task, torch.bfloat16, config))


def trace(task: Task, dtype: torch.dtype, config: Config | None = None) -> Model:
    """The model of ``task`` with parameters of ``dtype``, switched and frozen as ``config`` says.

    Raises TaskError where the model needs numbers, as data-dependent branches do.
    """
    inputs, targets = example(task)
    batches = [(with_rows(inputs, rows), with_rows(targets, rows)) for rows in ROWS]
    with meta_device():
        stages, layered = stages_of(task, dtype, config)
        sliced = config is not None and _slice_loss(task, stages[-1][1], config, layered=layered)
        parts = _SwitchedParts(stages, config, layered=layered)
        flows = [map_floats(given, lambda tensor: tensor.to(dtype)) for given, _ in batches]
        inputs_bytes = _bytes((flows[0], batches[0][1])) / ROWS[0]
        segments: list[Segment] = []
        seen: dict[Any, tuple[Segment, list[Any]]] = {}
        for index, (key, module, owner) in enumerate(stages):
            if sliced and index == len(stages) - 1:
                wanted = [targets for _, targets in batches]
                flows = [TargetedInputs(*pair) for pair in zip(flows, wanted, strict=True)]
            names = parts.inside(index)
            layer = (key, names, str(tree_map(_shape, flows[0])))
            if key is None or layer not in seen:
                runs = [_pass(module, flow, task.hidden_size, names) for flow in flows]
                segment = _segment(module, runs, owner)
                if names:
                    segment = _switched(segment, len(names), offloads=parts.offloads)
                seen[layer] = segment, [run.outputs for run in runs]
            segment, flows = seen[layer]
            segments.append(segment)
        ends = [
            _pass(Loss(task, targets), (flow,), task.hidden_size)
            for flow, (_, targets) in zip(flows, batches, strict=True)
        ]
        loss = _segment(nn.Identity(), ends, None)
    return Model(tuple(segments), loss, layered, dtype.itemsize, Affine(0.0, inputs_bytes))


class _SwitchedParts:
    """The modules that the file has recomputed, or whose activations it has wait on the host."""

    def __init__(self, stages: Sequence[Stage], config: Config | None, *, layered: bool) -> None:
        self.names: list[str] = []
        self.offloads, self._layered = False, layered
        if config is None:
            return
        chosen = config.settings.model
        if chosen.recomputation is None and not chosen.offload_activations:
            return
        model = stages[0][1]
        if layered:  # a copy of each, since one that repeats is there once
            model = nn.Sequential(*(copy.deepcopy(module) for _, module, _ in stages))
        self.offloads = chosen.recomputation is None
        pick = switches.offloaded if self.offloads else switches.recomputed
        self.names = pick(model, config)

    def inside(self, index: int) -> tuple[str, ...]:
        """Their names within layer ``index``; the layer itself is ""."""
        if not self._layered:
            return tuple(self.names)
        split = (name.partition(".") for name in self.names)
        return tuple(name for first, _, name in split if first == str(index))


def _slice_loss(task: Task, last: nn.Module, config: Config, *, layered: bool) -> bool:
    """True if the ``last`` stage computes the loss itself, some tokens at a time."""
    wanted = config.settings.model.loss_chunk_tokens
    head: Any = last if layered else task.head(last)
    if wanted is None or head is None:
        return False
    loss_head.switch(head, wanted)
    loss_head.listen(last, head)
    return True


class _Operations(OperationCounter):  # type: ignore[no-untyped-call]
    """Counts FLOPs, and the bytes of the largest result that is no view."""

    largest = 0

    def seen(self, func: Any, args: Any, kwargs: Any, out: Any, flops: float) -> None:
        if not func.is_view:
            sizes = (leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            self.largest = max(self.largest, *sizes, 0)


@dataclass
class _Pass:
    outputs: Any
    flops: float
    saved: float
    saved_wide: float
    saved_inside: float
    """Of the chosen parts, which ``saved`` leaves out."""
    inputs_inside: float
    output: float
    scratch: float
    attentions: int
    heads: int


def _pass(module: nn.Module, inputs: Any, width: int | None, chosen: Sequence[str] = ()) -> _Pass:
    """One forward and one backward pass. ``chosen``: parts of the module to be told apart."""
    inputs = map_floats(inputs, lambda tensor: tensor.detach().requires_grad_())
    weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, tuple[Any, int, bool, bool]] = {}
    open_parts, part_inputs = [], [0]

    def enter(part: nn.Module, given: Any) -> None:
        open_parts.append(part)
        leaves = tree_leaves(given)
        part_inputs[0] += _bytes([x for x in leaves if isinstance(x, Tensor) and x.requires_grad])

    def leave(part: nn.Module, given: Any, outputs: Any) -> None:
        open_parts.pop()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            wide = bool(tensor.ndim) and tensor.shape[-1] == width
            kept.setdefault(storage._cdata, (storage, storage.nbytes(), wide, bool(open_parts)))
        return tensor

    with Attention() as attention, _Operations() as operations, ExitStack() as hooks:
        for name in chosen:
            part = module.get_submodule(name)
            hooks.callback(part.register_forward_pre_hook(enter).remove)
            hooks.callback(part.register_forward_hook(leave).remove)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = call(module, inputs)
        leaves = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
        if leaves:
            torch.autograd.backward(leaves, [torch.empty_like(leaf) for leaf in leaves])
    for parameter in module.parameters():
        parameter.grad = None
    return _Pass(
        tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs),
        operations.forward + operations.backward,
        sum(size for _, size, _, inside in kept.values() if not inside),
        sum(size for _, size, wide, inside in kept.values() if wide and not inside),
        sum(size for _, size, _, inside in kept.values() if inside),
        part_inputs[0],
        _bytes(outputs),
        operations.largest,
        attention.calls,
        attention.heads,
    )


def _segment(module: nn.Module, runs: Sequence[_Pass], owner: int | None) -> Segment:
    parameters = dict(module.named_parameters())
    trained = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
    whole = sum(parameter.numel() for parameter in parameters.values())
    experts = (n for name, n in trained.items() if ".experts." in name and parameters[name].ndim == 3)
    largest = (sum(p.numel() for p in part.parameters(recurse=False)) for part in module.modules())
    sizes = ("flops", "saved", "saved_wide", "saved_inside", "inputs_inside", "output", "scratch")
    return Segment(
        parameters=sum(trained.values()) if owner is None else 0,
        frozen=whole - sum(trained.values()) if owner is None else 0,
        shared=0 if owner is None else whole,
        owner=owner,
        experts=sum(experts),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        largest=max(largest),
        attentions=runs[0].attentions,
        heads=runs[0].heads,
        **{name: _affine([getattr(run, name) for run in runs]) for name in sizes},
    )


def _switched(segment: Segment, parts: int, *, offloads: bool) -> Segment:
    """The segment with its chosen parts recomputed from their inputs, or offloaded."""
    inside = segment.saved_inside
    kept = segment.saved if offloads else segment.saved + segment.inputs_inside
    return replace(
        segment,
        saved=kept,
        saved_wide=kept,  # inputs of blocks, which tensor parallelism does not shard
        transient=inside.scaled(1 / parts),
        offloaded=inside if offloads else Affine(),
    )


def _affine(values: Sequence[float]) -> Affine:
    each = (values[1] - values[0]) / (ROWS[1] - ROWS[0])
    return Affine(values[0] - each * ROWS[0], each)


def _bytes(content: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(content) if isinstance(leaf, Tensor))


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf

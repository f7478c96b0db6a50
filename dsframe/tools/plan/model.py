"""What one step of a model computes and keeps, by running it on torch's meta device: shapes without
memory.

Operations and bytes are affine in the number of samples of a micro-batch (weights are there once,
activations once a sample), so two runs, of 2 and of 4 samples, give every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsframe.engines import precision
from dsframe.model import switches
from dsframe.model.forward import call
from dsframe.observe.flops import OperationCounter
from dsframe.observe.meta import Attention, Loss, model_of
from dsframe.tasks.meta import example, map_floats, meta_device, with_rows
from dsframe.tasks.task import Task

if TYPE_CHECKING:
    from dsframe.config import Config

ROWS = (2, 4)
"""Samples of the two runs. Not 1: BatchNorm refuses a single value."""


@dataclass(frozen=True)
class Affine:
    """A number that grows with the samples of a micro-batch: ``fixed + each * samples``."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, samples: int) -> float:
        """For so many samples."""
        return max(0.0, self.fixed + self.each * samples)


@dataclass(frozen=True)
class Model:
    """A task's model as the plan sees it. Sizes are bytes, but for elements of parameters."""

    parameters: int
    """Elements that are trained."""
    bytes_each: int
    """Of a parameter in the model's own number format."""
    frozen: int = 0
    """Elements that are not."""
    largest: int = 0
    """Elements of the module with the most of its own: what ZeRO-3 gathers at a time."""
    block: int = 0
    """Elements of a block: of the largest layer of a list of them, else of what has an attention."""
    layers: int = 1
    """Layers that can be split into pipeline stages; 1: the model is in one piece."""
    blocks: int = 1
    heads: int = 0
    """Of an attention; 0 without any."""
    buffer_bytes: int = 0
    flops: Affine = field(default_factory=Affine)
    """Floating-point operations of a forward and a backward pass."""
    saved: Affine = field(default_factory=Affine)
    """Kept for the backward pass, parameters left out."""
    saved_wide: Affine = field(default_factory=Affine)
    """Those whose last dimension is the hidden size: tensor parallelism does not shard them."""
    transient: Affine = field(default_factory=Affine)
    """What one recomputed part keeps while its turn in the backward pass comes."""
    scratch: Affine = field(default_factory=Affine)
    """The largest operation's results."""
    inputs: Affine = field(default_factory=Affine)
    """A micro-batch."""


def traced(config: Config, task: Task) -> Model:
    """The model in the number formats of a file. Raises TaskError as :func:`trace`."""
    model = trace(task, precision.parameter_dtype(config), config)
    if not config.deepspeed.torch_autocast.enabled:
        return model
    # fp32 parameters, with activations in 16 bits and 16-bit copies of the weights.
    short = trace(task, torch.bfloat16, config)
    saved = replace(short.saved, fixed=short.saved.fixed + 2.0 * model.parameters)
    return replace(short, saved=saved, bytes_each=model.bytes_each, inputs=model.inputs)


def trace(task: Task, dtype: torch.dtype, config: Config | None = None) -> Model:
    """The model of ``task`` with parameters of ``dtype``, switched and frozen as ``config`` says.

    Raises TaskError where the model needs numbers, as data-dependent branches do.
    """
    inputs, targets = example(task)
    with meta_device():
        module = model_of(task, dtype, config)
        layers = task.layers() or task.cut(module) or ()
        chosen = _chosen(module, config)
        runs = []
        for rows in ROWS:
            wanted = with_rows(targets, rows)
            given: Any = map_floats(with_rows(inputs, rows), lambda tensor: tensor.to(dtype))
            if rows == ROWS[0]:
                batch_bytes = _bytes((given, wanted)) / rows
            runs.append(_pass(module, given, Loss(task, wanted), task.hidden_size, chosen))
    return _model(module, runs, dtype, len(chosen), layers=layers, batch_bytes=batch_bytes)


def _chosen(module: nn.Module, config: Config | None) -> list[str]:
    """Names of the modules that the file has recomputed."""
    if config is None:
        return []
    if config.settings.model.recomputation is not None:
        return switches.recomputed(module, config)
    if config.deepspeed.pipeline.stages > 1 and config.deepspeed.pipeline.activation_checkpoint_interval:
        return switches.picked(module, None, "activation_checkpoint_interval")
    return []


class _Operations(OperationCounter):  # type: ignore[no-untyped-call]
    """Counts FLOPs, and the bytes of the largest result that is no view."""

    largest = 0

    def seen(self, func: Any, args: Any, kwargs: Any, out: Any, flops: float) -> None:
        if not func.is_view:
            sizes = (leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            self.largest = max(self.largest, *sizes, 0)


def _pass(module: nn.Module, inputs: Any, loss: Loss, width: int | None, chosen: Sequence[str]) -> dict[str, float]:
    """One forward and one backward pass. ``chosen``: parts of the module to be told apart."""
    inputs = map_floats(inputs, lambda tensor: tensor.detach().requires_grad_())
    weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, tuple[Any, int, bool, bool]] = {}
    open_parts: list[nn.Module] = []
    part_inputs = [0]

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
            value = loss(call(module, inputs))
        if value.requires_grad:
            value.backward(torch.empty_like(value))
    for parameter in module.parameters():
        parameter.grad = None
    return {
        "flops": operations.forward + operations.backward,
        "saved": sum(size for _, size, _, inside in kept.values() if not inside),
        "saved_wide": sum(size for _, size, wide, inside in kept.values() if wide and not inside),
        "inside": sum(size for _, size, _, inside in kept.values() if inside),
        "part_inputs": part_inputs[0],
        "scratch": operations.largest,
        "blocks": attention.calls,
        "heads": attention.heads,
    }


def _model(
    module: nn.Module,
    runs: Sequence[dict[str, float]],
    dtype: torch.dtype,
    parts: int,
    *,
    layers: Sequence[Any],
    batch_bytes: float,
) -> Model:
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    whole = sum(parameter.numel() for parameter in module.parameters())
    sizes = {name: _affine([run[name] for run in runs]) for name in runs[0]}
    saved, wide, inside = sizes["saved"], sizes["saved_wide"], sizes["inside"]
    if parts:  # computed again from their inputs, which tensor parallelism does not shard
        inputs = sizes["part_inputs"]
        saved = Affine(saved.fixed + inputs.fixed, saved.each + inputs.each)
        wide = Affine(wide.fixed + inputs.fixed, wide.each + inputs.each)
    blocks = max(1, int(runs[0]["blocks"]))
    # A model that is cut is made of its own modules; one that is given as functions is a list of what they make.
    made = [layer for layer in layers if isinstance(layer, nn.Module)] or (list(module.children()) if layers else [])
    in_layers = [sum(p.numel() for p in layer.parameters()) for layer in made]
    return Model(
        parameters=trained,
        bytes_each=dtype.itemsize,
        frozen=whole - trained,
        largest=max(sum(p.numel() for p in part.parameters(recurse=False)) for part in module.modules()),
        block=max(in_layers, default=trained // blocks),
        layers=max(1, len(layers)),
        blocks=blocks,
        heads=int(runs[0]["heads"]),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        flops=sizes["flops"],
        saved=saved,
        saved_wide=wide,
        transient=Affine(inside.fixed / parts, inside.each / parts) if parts else Affine(),
        scratch=sizes["scratch"],
        inputs=Affine(0.0, batch_bytes),
    )


def _affine(values: Sequence[float]) -> Affine:
    each = (values[1] - values[0]) / (ROWS[1] - ROWS[0])
    return Affine(values[0] - each * ROWS[0], each)


def _bytes(content: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(content) if isinstance(leaf, Tensor))

"""Measures what a step of a model computes and keeps, by running it on torch's meta device.

Bytes are affine in the number of samples of a micro-batch (weights are constant, activations proportional), so two
runs, with 2 and 4 samples, give every size, with and without recomputed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsframe.engines import precision
from dsframe.errors import ConfigError
from dsframe.model import switches
from dsframe.model.forward import call
from dsframe.tasks.meta import example, map_floats, meta_device, with_rows
from dsframe.tasks.task import Task
from dsframe.tools.plan.meta import Attention, Loss, model_of
from dsframe.values import elements, tensors_of, trainable

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
        """Returns the value for so many samples."""
        return max(0.0, self.fixed + self.each * samples)

    def plus(self, other: Affine) -> Affine:
        """Returns the sum of both."""
        return Affine(self.fixed + other.fixed, self.each + other.each)


@dataclass(frozen=True)
class Model:
    """A task's model as the plan sees it. Sizes in bytes, parameters in elements."""

    parameters: int
    """Trained elements."""
    bytes_each: int
    """Bytes of a parameter in the model's dtype."""
    frozen: int = 0
    """Frozen elements."""
    largest: int = 0
    """Elements of the module with the most parameters of its own: what ZeRO-3 gathers at a time."""
    block: int = 0
    """Elements of the largest block; of the model if it has none."""
    buffer_bytes: int = 0
    saved: Affine = field(default_factory=Affine)
    """Kept for the backward pass, without parameters."""
    saved_wide: Affine = field(default_factory=Affine)
    """Kept tensors whose last dimension is the hidden size, which tensor parallelism does not shard."""
    transient: Affine = field(default_factory=Affine)
    """Kept by one recomputed block during its backward pass."""
    scratch: Affine = field(default_factory=Affine)
    """The largest operation's results."""
    inputs: Affine = field(default_factory=Affine)
    """A micro-batch."""
    recomputed: Model | None = None
    """The same model with recomputed blocks: those in the file, else all. None if it has no blocks."""


def traced(config: Config, task: Task) -> Model:
    """Returns the model in the file's number formats. Raises TaskError as :func:`trace`."""
    dtype = precision.parameter_dtype(config)
    if not config.deepspeed.torch_autocast.enabled:
        return trace(task, dtype, config)
    model = trace(task, torch.bfloat16, config)

    def mixed(model: Model) -> Model:
        """Converts to fp32 parameters, with activations and weight copies in 16 bits."""
        saved = replace(model.saved, fixed=model.saved.fixed + 2.0 * model.parameters)
        return replace(model, saved=saved, bytes_each=dtype.itemsize)

    return replace(mixed(model), recomputed=model.recomputed and mixed(model.recomputed))


def trace(task: Task, dtype: torch.dtype, config: Config | None = None) -> Model:
    """Returns the model of ``task`` with parameters of ``dtype``, frozen as in ``config``.

    Raises TaskError if the model needs values, for example for data-dependent branches.
    """
    inputs, targets = example(task)
    with meta_device():
        module = model_of(task, dtype, config)
        blocks = _blocks(module, config)
        runs = []
        for rows in ROWS:
            wanted = with_rows(targets, rows)
            given: Any = map_floats(with_rows(inputs, rows), lambda tensor: tensor.to(dtype))
            runs.append(_pass(module, given, Loss(task, wanted), task.hidden_size, blocks))
    batch_bytes = _bytes((with_rows(inputs, 1), with_rows(targets, 1)))
    return _model(module, runs, dtype, blocks, batch_bytes)


def _blocks(module: nn.Module, config: Config | None) -> list[str]:
    if config is not None and config.settings.model.recomputation is not None:
        return switches.recomputed(module, config)
    try:
        return switches.picked(module, None, "activation_checkpointing")
    except ConfigError:  # a model without blocks
        return []


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the bytes of the largest result that is not a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = (leaf.nbytes for leaf in tensors_of(out))
            self.bytes = max(self.bytes, *sizes, 0)
        return out


def _pass(module: nn.Module, inputs: Any, loss: Loss, width: int | None, blocks: Sequence[str]) -> dict[str, float]:
    """Runs one forward and one backward pass, and returns sizes in bytes. ``blocks``: modules to count separately."""
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

    with Attention(), _Largest() as largest, ExitStack() as hooks:
        for name in blocks:
            part = module.get_submodule(name)
            hooks.callback(part.register_forward_pre_hook(enter).remove)
            hooks.callback(part.register_forward_hook(leave).remove)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = loss(call(module, inputs))
        if value.requires_grad:
            value.backward(torch.empty_like(value))
    for parameter in module.parameters():
        parameter.grad = None

    def kept_bytes(*, wide: bool, inside: bool) -> int:
        return sum(size for _, size, is_wide, is_inside in kept.values() if is_inside == inside and is_wide >= wide)

    return {
        "outside": kept_bytes(wide=False, inside=False),
        "outside_wide": kept_bytes(wide=True, inside=False),
        "inside": kept_bytes(wide=False, inside=True),
        "inside_wide": kept_bytes(wide=True, inside=True),
        "part_inputs": part_inputs[0],
        "scratch": largest.bytes,
    }


def _model(
    module: nn.Module, runs: Sequence[dict[str, float]], dtype: torch.dtype, blocks: Sequence[str], batch_bytes: int
) -> Model:
    trained = elements(trainable(module))
    all_elements = elements(module.parameters())
    in_blocks = [elements(module.get_submodule(name).parameters()) for name in blocks]
    sizes = {name: _affine([run[name] for run in runs]) for name in runs[0]}
    inside = sizes["inside"]
    model = Model(
        parameters=trained,
        bytes_each=dtype.itemsize,
        frozen=all_elements - trained,
        largest=max(elements(part.parameters(recurse=False)) for part in module.modules()),
        block=max(in_blocks, default=all_elements),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        saved=sizes["outside"].plus(inside),
        saved_wide=sizes["outside_wide"].plus(sizes["inside_wide"]),
        scratch=sizes["scratch"],
        inputs=Affine(0.0, batch_bytes),
    )
    if not blocks:
        return model
    recomputed = replace(
        model,  # blocks keep their inputs, which tensor parallelism does not shard
        saved=sizes["outside"].plus(sizes["part_inputs"]),
        saved_wide=sizes["outside_wide"].plus(sizes["part_inputs"]),
        transient=Affine(inside.fixed / len(blocks), inside.each / len(blocks)),
    )
    return replace(model, recomputed=recomputed)


def _affine(values: Sequence[float]) -> Affine:
    each = (values[1] - values[0]) / (ROWS[1] - ROWS[0])
    return Affine(values[0] - each * ROWS[0], each)


def _bytes(content: Any) -> int:
    return sum(leaf.nbytes for leaf in tensors_of(content))

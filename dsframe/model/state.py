"""The training state that engines return and load: by the model's own names, in full shape and fp32. A parameter's
state means the same on every engine, whatever its memory layout: its fp32 weight (the master if the model computes in
16 bits), and a tensor of the same shape for each of the optimizer's tensors, by torch's keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dsframe.errors import CheckpointError
from dsframe.values import Tensors

Shapes = Mapping[str, Sequence[int]]
"""Shapes by the name of a parameter."""
Number = float | list[float]
"""A scalar in an optimizer's state; in a list, if a user's optimizer keeps it in a 0-d tensor."""


@dataclass(frozen=True)
class ParameterState:
    """State of one parameter. Tensors may be views of live state, valid until the next training step."""

    name: str
    """The name in ``model.named_parameters()``, on every engine."""
    weight: Tensor
    """float32, or float64 if the model trains in it; full shape."""
    moments: Tensors
    """The optimizer's tensors, such as ``exp_avg``, in the weight's shape and dtype. Empty before the first update."""
    scalars: Mapping[str, Number]
    """The optimizer's scalars, such as Adam's ``step``."""

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in (self.weight, *self.moments.values()))


WEIGHT = "weight"
"""The key of a parameter's weight in its tensors, next to the keys of the moments."""


@dataclass(frozen=True)
class TensorShard:
    """The range of one tensor that this rank holds, flattened: ``size`` elements starting at ``first``."""

    shape: tuple[int, ...]
    """Shape of the complete tensor."""
    dtype: torch.dtype
    """Dtype in which it is saved: float32, or float64."""
    first: int
    size: int
    read: Callable[[], Tensor]
    """Returns the range, flat, on any device; a view of live state if possible, valid until the next training step."""
    in_order: bool = False
    """True if every rank that lists it must read it once, in order, because it is gathered or swapped in."""


@dataclass(frozen=True)
class ParameterShard:
    """This rank's part of one parameter."""

    name: str
    tensors: Mapping[str, TensorShard]
    """The weight under ``WEIGHT``, first, and then the moments by their keys."""
    scalars: Mapping[str, Number]


class ShardedParameters:
    """Parameters of which each rank holds ranges: can be iterated in full, or saved shard by shard."""

    def __init__(self, shards: Sequence[ParameterShard], whole: Iterable[ParameterState]) -> None:
        """``shards``: this rank's, in the order of the training's lists; ranks that list the same do so in the same
        order. ``whole``: as ``EngineState.parameters``."""
        self.shards, self._whole = shards, whole

    def __iter__(self) -> Iterator[ParameterState]:
        """**Collective.** Iterates over complete parameters."""
        return iter(self._whole)


@dataclass(frozen=True)
class LossScaleState:
    """Dynamic loss scaling of fp16 as in DeepSpeed (``runtime/fp16/loss_scaler.py``)."""

    scale: float
    hysteresis_left: int
    steps: int
    last_overflow: int


@dataclass(frozen=True)
class EngineState:
    """The complete training state of an engine."""

    updates: int
    """Optimizer updates applied: the only argument of schedules."""
    loss_scale: LossScaleState | None
    buffers: Tensors
    """``persistent.saved_buffers`` of this rank: BatchNorm's statistics may differ between ranks."""
    aliases: Mapping[str, str]
    """Further names of shared parameters -> the name that is saved."""
    parameters: Iterable[ParameterState]
    """**Collective** to iterate: every rank gets every parameter, in the same order, one at a time. If each rank knows
    what it holds, it is a :class:`ShardedParameters`, which can be saved without gathering. Saving gathers another
    iterator twice: once to lay out the files."""


class SavedState(Protocol):
    """The state to load: the same on every rank."""

    @property
    def updates(self) -> int: ...

    @property
    def loss_scale(self) -> LossScaleState | None: ...

    @property
    def shapes(self) -> Shapes:
        """Full shape of each parameter."""

    @property
    def resized(self) -> Collection[str]:
        """Buffers to which training has given another shape than in the built model."""

    def buffers(self) -> Tensors: ...

    def parameter(self, name: str) -> ParameterState:
        """Returns one parameter on the CPU; reads it each time. Not collective."""

    def part(self, name: str, first: int, size: int) -> ParameterState:
        """Returns elements ``first`` to ``first + size`` of one flattened parameter and of its moments, and reads
        nothing else. Raises CheckpointError if a moment has another shape than the weight."""


class SavedView:
    """A view of a saved state: the same unless a subclass overrides it."""

    def __init__(self, saved: SavedState) -> None:
        self._saved = saved

    @property
    def updates(self) -> int:
        """The saved value."""
        return self._saved.updates

    @property
    def loss_scale(self) -> LossScaleState | None:
        """The saved value."""
        return self._saved.loss_scale

    @property
    def shapes(self) -> Shapes:
        """Full shape of each visible parameter."""
        return self._saved.shapes

    @property
    def resized(self) -> Collection[str]:
        """The saved value."""
        return self._saved.resized

    def buffers(self) -> Tensors:
        """Returns the visible buffers."""
        return self._saved.buffers()

    def parameter(self, name: str) -> ParameterState:
        """Returns one visible parameter."""
        return self.seen(self._saved.parameter(name))

    def part(self, name: str, first: int, size: int) -> ParameterState:
        """Returns a range of one visible parameter."""
        return self.seen(self._saved.part(name, first, size))

    def seen(self, parameter: ParameterState) -> ParameterState:
        """Returns a parameter, or a range of one, as this view shows it."""
        return parameter


def narrowed(parameter: ParameterState, first: int, size: int) -> ParameterState:
    """Returns views of a range of a complete parameter, like :meth:`SavedState.part`."""
    for key, moment in parameter.moments.items():
        if moment.shape != parameter.weight.shape:
            raise CheckpointError(
                f"{parameter.name}: the optimizer's {key} has shape {list(moment.shape)}, "
                f"the weight {list(parameter.weight.shape)}: such state cannot be sharded; "
                "resume where each rank holds the whole model, such as in one process"
            )
    cut: Callable[[Tensor], Tensor] = lambda tensor: tensor.flatten().narrow(0, first, size)  # noqa: E731
    moments = {key: cut(moment) for key, moment in parameter.moments.items()}
    return ParameterState(parameter.name, cut(parameter.weight), moments, parameter.scalars)


def full_precision(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a tensor of ``dtype`` is kept: float32, or float64 if it has that."""
    return torch.promote_types(dtype, torch.float32)


_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""Counters that torch's optimizers keep as 0-d tensors for each weight (torch 2.13: ``step`` all, ASGD, NAdam)."""


def split(
    held: Mapping[str, Any], shape: Sequence[int], optimizer: torch.optim.Optimizer | None = None
) -> tuple[Tensors, dict[str, Number]]:
    """Returns an optimizer's state of a weight of ``shape`` as tensors and scalars, without None (SGD without
    momentum). The tensors of a 0-d weight, such as CLIP's ``logit_scale``, are also 0-d."""
    users = optimizer is not None and not _is_of(optimizer, "torch.optim", "deepspeed.")
    tensors = {key: value for key, value in held.items() if isinstance(value, Tensor)}
    moments = {key: value for key, value in tensors.items() if value.ndim or (not len(shape) and key not in _NUMBERS)}
    numbers = {k: v for k, v in held.items() if k not in moments and isinstance(v, (Tensor, int, float))}
    if users:
        return moments, {key: [value.item()] if isinstance(value, Tensor) else value for key, value in numbers.items()}
    return moments, {key: float(value) for key, value in numbers.items()}


def _is_of(optimizer: torch.optim.Optimizer, *packages: str) -> bool:
    keeper = getattr(optimizer, "aux_optimizer", None) or optimizer
    return any(cls.__module__.startswith(packages) for cls in type(keeper).__mro__[:-2])


def put_scalars(
    optimizer: torch.optim.Optimizer,
    held: dict[str, Any],
    scalars: Mapping[str, Number],
    group: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Writes scalars in the optimizer's form: torch's have 0-d float32 tensors, others plain numbers. Torch keeps them
    on the CPU unless the update is fused or capturable. DeepSpeed's Muon has no counters; they are those of its inner
    Adam."""
    torchs_own = _is_of(optimizer, "torch.optim")
    step_device = device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    for key, value in scalars.items():
        if isinstance(value, list):
            held[key] = torch.tensor(value[0], device=step_device)
        elif torchs_own:
            held[key] = torch.tensor(value, dtype=torch.float32, device=step_device)
        else:  # DeepSpeed's Adam counts its steps in integers
            held[key] = int(value) if float(value).is_integer() and not isinstance(value, bool) else value

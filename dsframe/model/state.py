"""The state of training, by the model's own names, in full shape and fp32: engines give it and load it.

A parameter's state means the same on every engine, however it lies in memory: its fp32 weight (the master where the model
computes in 16 bits), and for each tensor the optimizer keeps about it one of the same shape, by torch's own key names.
"""

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
"""A number that an optimizer keeps; in a list, if a user's optimizer keeps it in a tensor without dimensions."""


@dataclass(frozen=True)
class ParameterState:
    """One parameter. Tensors may be views of living state: they hold until the next training step."""

    name: str
    """The name in ``model.named_parameters()``, on every engine."""
    weight: Tensor
    """float32, float64 where the model trains in it; full shape."""
    moments: Tensors
    """The optimizer's tensors, such as ``exp_avg``; as the weight is. Empty before the first update."""
    scalars: Mapping[str, Number]
    """The optimizer's numbers, such as Adam's ``step``."""

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in (self.weight, *self.moments.values()))


WEIGHT = "weight"
"""The key of a parameter's weight among its tensors, next to those of the moments."""


@dataclass(frozen=True)
class TensorShard:
    """The range that this rank holds of one tensor, flattened: ``size`` elements from ``first`` on."""

    shape: tuple[int, ...]
    """The whole tensor's."""
    dtype: torch.dtype
    """In which it is saved: float32, or float64."""
    first: int
    size: int
    read: Callable[[], Tensor]
    """Returns the range, flat, on any device: a view of living state where it can, which holds until the next training step."""
    in_order: bool = False
    """True if every rank that lists it has to read it, in the order of the list, once: it is gathered or swapped in."""


@dataclass(frozen=True)
class ParameterShard:
    """What this rank holds of one parameter."""

    name: str
    tensors: Mapping[str, TensorShard]
    """The weight under ``WEIGHT``, first, and then the moments by their keys."""
    scalars: Mapping[str, Number]


class ShardedParameters:
    """Parameters of which each rank holds ranges: to be iterated whole, or to be saved shard by shard."""

    def __init__(self, shards: Sequence[ParameterShard], whole: Iterable[ParameterState]) -> None:
        """``shards``: this rank's, in the order of training's own lists; ranks that list the same do so in the same order.
        ``whole``: as ``EngineState.parameters``."""
        self.shards, self._whole = shards, whole

    def __iter__(self) -> Iterator[ParameterState]:
        """**Collective.**"""
        return iter(self._whole)


@dataclass(frozen=True)
class LossScaleState:
    """Dynamic loss scaling of fp16, DeepSpeed's meaning (``runtime/fp16/loss_scaler.py``)."""

    scale: float
    hysteresis_left: int
    steps: int
    last_overflow: int


@dataclass(frozen=True)
class EngineState:
    """Everything an engine knows about the training, to be taken away."""

    updates: int
    """Optimizer updates applied: the schedule's only argument."""
    loss_scale: LossScaleState | None
    buffers: Tensors
    """As ``persistent.saved_buffers`` of this rank: BatchNorm's statistics may differ between ranks."""
    aliases: Mapping[str, str]
    """Further names of shared parameters -> the name that is saved."""
    parameters: Iterable[ParameterState]
    """**Collective** to iterate: every rank gets every parameter, in the same order, one at a time. Where each
    rank knows what it holds it is a :class:`ShardedParameters`, which nobody need gather to save; an iterator is gathered twice in
    a save, once to lay out the files."""


class SavedState(Protocol):
    """State to be put back: the same on every rank."""

    @property
    def updates(self) -> int: ...

    @property
    def loss_scale(self) -> LossScaleState | None: ...

    @property
    def shapes(self) -> Shapes:
        """Every parameter's full shape."""

    @property
    def resized(self) -> Collection[str]:
        """The buffers to which the training has given another shape than the built model has."""

    def buffers(self) -> Tensors: ...

    def parameter(self, name: str) -> ParameterState:
        """One parameter, read anew each time, on the CPU. Not collective."""

    def part(self, name: str, first: int, size: int) -> ParameterState:
        """Elements ``first`` to ``first + size`` of one flattened parameter and of its moments; nothing else is read.

        Raises CheckpointError where a moment has another shape than the weight.
        """


class SavedView:
    """A saved state seen another way: as saved, but for what a subclass says otherwise."""

    def __init__(self, saved: SavedState) -> None:
        self._saved = saved

    @property
    def updates(self) -> int:
        """As saved."""
        return self._saved.updates

    @property
    def loss_scale(self) -> LossScaleState | None:
        """As saved."""
        return self._saved.loss_scale

    @property
    def shapes(self) -> Shapes:
        """Full shape of each visible parameter."""
        return self._saved.shapes

    @property
    def resized(self) -> Collection[str]:
        """As saved."""
        return self._saved.resized

    def buffers(self) -> Tensors:
        """The visible buffers."""
        return self._saved.buffers()

    def parameter(self, name: str) -> ParameterState:
        """One visible parameter."""
        return self.seen(self._saved.parameter(name))

    def part(self, name: str, first: int, size: int) -> ParameterState:
        """A range of one visible parameter."""
        return self.seen(self._saved.part(name, first, size))

    def seen(self, parameter: ParameterState) -> ParameterState:
        """Returns a parameter, or a range of one, as this view has it."""
        return parameter


def narrowed(parameter: ParameterState, first: int, size: int) -> ParameterState:
    """The range of a whole parameter as :meth:`SavedState.part` returns it: views."""
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
    """The format in which a tensor of ``dtype`` is kept: float32, or float64 where it is so."""
    return torch.promote_types(dtype, torch.float32)


_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""Names of counters that torch's optimizers keep as 0-d tensors for every weight (torch 2.13: ``step`` all, ASGD, NAdam)."""


def split(
    held: Mapping[str, Any], shape: Sequence[int], optimizer: torch.optim.Optimizer | None = None
) -> tuple[Tensors, dict[str, Number]]:
    """An optimizer's entry for a weight of ``shape`` as tensors and numbers. Entries that are None (SGD without momentum) are
    left out. About a weight without dimensions, such as CLIP's ``logit_scale``, tensors have none either."""
    users = optimizer is not None and not _is_of(optimizer, "torch.optim", "deepspeed.")
    tensors = {key: value for key, value in held.items() if isinstance(value, Tensor)}
    moments = {key: value for key, value in tensors.items() if value.ndim or (not len(shape) and key not in _NUMBERS)}
    numbers = {k: v for k, v in held.items() if k not in moments and isinstance(v, (Tensor, int, float))}
    if users:
        return moments, {key: [value.item()] if isinstance(value, Tensor) else value for key, value in numbers.items()}
    return moments, {key: float(value) for key, value in numbers.items()}


def _is_of(optimizer: torch.optim.Optimizer, *packages: str) -> bool:
    """True of an optimizer of these packages, or of a class made from one."""
    keeper = getattr(optimizer, "aux_optimizer", None) or optimizer
    return any(cls.__module__.startswith(packages) for cls in type(keeper).__mro__[:-2])


def put_scalars(
    optimizer: torch.optim.Optimizer,
    held: dict[str, Any],
    scalars: Mapping[str, Number],
    group: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Writes numbers as the optimizer keeps them: torch as 0-d float32 tensors, others as plain numbers.

    torch keeps them on the CPU unless the update is fused or capturable. Of DeepSpeed's Muon, which counts nothing itself, they are
    those of the Adam inside.
    """
    torchs_own = _is_of(optimizer, "torch.optim")
    step_device = device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    for key, value in scalars.items():
        if isinstance(value, list):
            held[key] = torch.tensor(value[0], device=step_device)
            continue
        held[key] = torch.tensor(value, dtype=torch.float32, device=step_device) if torchs_own else _plain(value)


def _plain(value: float) -> int | float:
    whole = float(value).is_integer() and not isinstance(value, bool)
    return int(value) if whole else value  # DeepSpeed's Adam counts its steps in whole numbers

"""The state of training, by the model's own names, in full shape and fp32: engines give it and load it.

A parameter's state means the same on every engine, however it lies in memory: its fp32 weight (the master where the model
computes in 16 bits), and for each tensor the optimizer keeps about it one of the same shape, by torch's own key names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dsframe.errors import CheckpointError

Number = float | list[float]
"""A number that an optimizer keeps; in a list, if a user's optimizer keeps it in a tensor without dimensions."""


@dataclass(frozen=True)
class ParameterState:
    """One parameter. Tensors may be views of living state: they hold until the next training step."""

    name: str
    """The name in ``model.named_parameters()``, on every engine."""
    weight: Tensor
    """float32, float64 where the model trains in it; full shape."""
    moments: Mapping[str, Tensor]
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
    buffers: Mapping[str, Tensor]
    """The model's persistent buffers, as this rank has them: BatchNorm's statistics may differ between ranks."""
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
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Every parameter's full shape."""

    def buffers(self) -> Mapping[str, Tensor]: ...

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
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Full shape of each visible parameter."""
        return self._saved.shapes

    def buffers(self) -> Mapping[str, Tensor]:
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


def persistent_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """The buffers that belong to the model's ``state_dict``, by name. BatchNorm's statistics are such, causal masks are not.

    Nor are sparse ones, such as a graph's edges: the files hold dense tensors, and ``model()`` makes these anew. Without
    ``remove_duplicate`` a buffer has each of its names.
    """
    buffers = {}
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=remove_duplicate):
            if name not in module._non_persistent_buffers_set and buffer.layout == torch.strided:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


_LEFT_OUT = "_dsframe_left_out"


def leave_out(model: nn.Module, names: Iterable[str]) -> None:
    """Checkpoints have none of these parameters of ``model``, which are frozen and built anew at each start."""
    setattr(model, _LEFT_OUT, frozenset(names))


def left_out(model: nn.Module) -> frozenset[str]:
    """The names that :func:`leave_out` was given."""
    excluded: frozenset[str] = getattr(model, _LEFT_OUT, frozenset())
    return excluded


def saved_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``model.named_parameters()`` without those that checkpoints leave out."""
    without = left_out(model)
    return ((name, parameter) for name, parameter in model.named_parameters() if name not in without)


def aliases(model: nn.Module) -> dict[str, str]:
    """The second and further names of parameters that the model has under several, such as tied embeddings, and of the buffers
    of such modules."""
    first: dict[int, str] = {}
    every = dict(model.named_parameters(remove_duplicate=False)) | persistent_buffers(model, remove_duplicate=False)
    saved, without = persistent_buffers(model), left_out(model)
    further = {name: first[id(tensor)] for name, tensor in every.items() if first.setdefault(id(tensor), name) != name}
    return {name: kept for name, kept in further.items() if name not in saved and kept not in without}


@torch.no_grad()
def load_buffers(model: nn.Module, saved: SavedState) -> None:
    """Puts the saved buffers into the model, in place. Raises CheckpointError where names or shapes differ."""
    kept = saved.buffers()
    modules = dict(model.named_modules())
    for name, buffer in kept.items():
        if (module := modules.get(name.rpartition(".")[0])) is not None:
            _make_room(module, name.rpartition(".")[2], buffer)
    buffers = persistent_buffers(model)
    compare(
        "buffer", {name: tuple(b.shape) for name, b in buffers.items()}, {n: tuple(b.shape) for n, b in kept.items()}
    )
    for name, buffer in buffers.items():
        buffer.copy_(kept[name])


def _make_room(module: nn.Module, key: str, saved: Tensor) -> None:
    """Makes a buffer that a forward pass makes of None (``register_buffer("mean", None)``), or to which a module that loads itself,
    as those of ``torch.ao.quantization`` do, gives another shape."""
    now = module._buffers.get(key)
    if key in module._buffers and now is None:
        device = next((weight.device for weight in module.parameters()), saved.device)
        module._buffers[key] = saved.to(device, copy=True)
    loads_itself = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    if now is not None and now.shape != saved.shape and loads_itself:
        module._buffers[key] = torch.empty(saved.shape, dtype=now.dtype, device=now.device)


def compare(what: str, expected: Mapping[str, Sequence[int]], saved: Mapping[str, Sequence[int]]) -> None:
    """Raises CheckpointError, naming the first few differences, where names or shapes are not the same."""
    differences = [f"{name} is new" for name in expected if name not in saved]
    made = what == "buffer" and any(name not in expected for name in saved)
    differences += [f"{name} is gone" for name in saved if name not in expected]
    differences += [
        f"{name} has shape {list(expected[name])}, saved {list(saved[name])}"
        for name in expected
        if name in saved and tuple(expected[name]) != tuple(saved[name])
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(
            f"the checkpoint belongs to another model ({what}s differ): {'; '.join(differences[:3])}{more}"
            + (
                ". A buffer that forward makes is to be registered in __init__, or with persistent=False"
                if made
                else ""
            )
        )


_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""Names of counters that torch's optimizers keep as 0-d tensors for every weight (torch 2.13: ``step`` all, ASGD, NAdam)."""


def split(
    held: Mapping[str, Any], shape: Sequence[int], optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict[str, Tensor], dict[str, Number]]:
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

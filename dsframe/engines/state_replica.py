"""Reads and writes the state of a plain optimizer: full replicas, and DeepSpeed's stage 0.

Nothing here is collective: every rank holds everything, and reads everything from the same files. Exception: a
``ParameterView`` whose ``whole`` gathers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsframe.errors import CheckpointError
from dsframe.model.persistent import compare
from dsframe.model.state import (
    WEIGHT,
    Number,
    ParameterShard,
    ParameterState,
    SavedState,
    TensorShard,
    full_precision,
    put_scalars,
    split,
)
from dsframe.values import Tensors


@dataclass(frozen=True)
class ParameterView:
    """View of a parameter's state: in a separate tensor, or in a piece of a flat tensor."""

    name: str
    shape: Sequence[int]
    master: Tensor
    """The tensor that the optimizer updates; the key of its state."""
    start: int | None = None
    """First element in a flat ``master``; None if the master belongs to this parameter only."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns a view of this parameter's piece of the master, or of one of its state tensors."""
        if self.start is None:
            return tensor
        return tensor.narrow(0, self.start, self.numel).view(self.shape)

    def whole(self, piece: Tensor) -> Tensor:
        """Returns what ``cut`` returns, in full shape and in fp32 or wider."""
        return piece.to(full_precision(piece.dtype))

    def span(self, tensor: Tensor) -> tuple[int, int]:
        """Returns first element and length of the range of the master, or of a state tensor, that this rank holds."""
        return 0, self.numel if self.start is not None else tensor.numel()

    def flat(self, tensor: Tensor) -> Tensor:
        """Returns the range itself."""
        return self.cut(tensor).flatten()

    def load(self, saved: SavedState) -> ParameterState:
        """Returns the part of the saved parameter that :meth:`target` takes."""
        return saved.parameter(self.name)

    def target(self, tensor: Tensor) -> Tensor:
        """Returns a view of the master, or of a state tensor, in the shape of what ``load`` returns."""
        return self.cut(tensor)

    def moment(self, whole: Tensor) -> Tensor:
        """Returns zeros, laid out as the optimizer's state of shape ``whole``. Raises CheckpointError if it cannot."""
        if tuple(whole.shape) == tuple(self.shape):
            return torch.zeros_like(self.master, requires_grad=False)
        if self.start is not None:
            raise CheckpointError(f"{self.name}: the optimizer's {list(whole.shape)} cannot be cut into shares")
        return torch.zeros(whole.shape, dtype=self.master.dtype, device=self.master.device)

    def put(self, whole: Tensor, tensor: Tensor | None = None) -> None:
        """Writes this rank's part of ``whole`` to the master, or to another tensor with its layout."""
        held = self.master.detach() if tensor is None else tensor
        first, size = self.span(held)
        target = self.target(held)
        target.copy_(whole if target.shape == whole.shape else whole.flatten()[first : first + size])


def read(
    slots: Iterable[ParameterView], frozen: Iterable[ParameterView], optimizer: torch.optim.Optimizer
) -> Iterator[ParameterState]:
    """Yields each parameter's state in fp32 (views where this rank holds it whole); ``frozen`` ones only have a weight."""
    for slot in slots:
        moments, scalars = split(optimizer.state.get(slot.master, {}), slot.master.shape, optimizer)
        weight = slot.whole(slot.cut(slot.master.detach()))
        full = {key: slot.whole(slot.cut(moment)) for key, moment in moments.items()}
        yield ParameterState(slot.name, weight, full, scalars)
    for slot in frozen:
        yield ParameterState(slot.name, slot.whole(slot.cut(slot.master.detach())), {}, {})


def shards(
    slots: Iterable[ParameterView], frozen: Iterable[ParameterView], optimizer: torch.optim.Optimizer
) -> list[ParameterShard]:
    """Returns this rank's ranges of each parameter's state, as views."""
    local = []
    for slot in slots:
        moments, scalars = split(optimizer.state.get(slot.master, {}), slot.master.shape, optimizer)
        local.append(_shard(slot, {WEIGHT: slot.master, **moments}, scalars))
    return local + [_shard(slot, {WEIGHT: slot.master}, {}) for slot in frozen]


def _shard(slot: ParameterView, tensors: Tensors, scalars: Mapping[str, Number]) -> ParameterShard:
    def shard_of(tensor: Tensor) -> TensorShard:
        as_weight = slot.start is not None or tensor.shape == slot.master.shape
        shape = tuple(slot.shape if as_weight else tensor.shape)
        return TensorShard(shape, full_precision(tensor.dtype), *slot.span(tensor), lambda: slot.flat(tensor.detach()))

    return ParameterShard(slot.name, {key: shard_of(tensor) for key, tensor in tensors.items()}, scalars)


@torch.no_grad()
def write(
    slots: Sequence[ParameterView], frozen: Sequence[ParameterView], optimizer: torch.optim.Optimizer, saved: SavedState
) -> None:
    """Restores saved state, in place if there is some. Raises CheckpointError if the models differ."""
    compare("parameter", {slot.name: tuple(slot.shape) for slot in (*slots, *frozen)}, saved.shapes)
    groups = {id(master): group for group in optimizer.param_groups for master in group["params"]}
    shared: dict[int, dict[str, Number]] = {}
    for slot in slots:
        parameter = slot.load(saved)
        same_step(slot.name, shared.setdefault(id(slot.master), dict(parameter.scalars)), parameter.scalars)
        slot.target(slot.master.detach()).copy_(parameter.weight)
        if not parameter.moments and not parameter.scalars:
            if slot.start is None:
                optimizer.state.pop(slot.master, None)
            continue
        held = optimizer.state[slot.master]
        for key, value in parameter.moments.items():
            if key not in held or held[key] is None:
                held[key] = slot.moment(value)
            slot.target(held[key]).copy_(value)
        put_scalars(optimizer, held, parameter.scalars, groups[id(slot.master)], slot.master.device)
    for slot in frozen:
        slot.target(slot.master.detach()).copy_(slot.load(saved).weight)


def same_step(name: str, first: dict[str, Number], other: object) -> None:
    """Raises CheckpointError if parameters that share one optimizer entry were saved with different step counts."""
    if first != other:
        raise CheckpointError(
            f"{name} has step count {other or 'none'}, but its neighbours {first or 'none'}: parameters have different step "
            "counts, and this engine keeps one for a group. Resume on an engine with one for each (ddp, fsdp, horovod, single), or "
            'give those that are trained anew a group of their own: "parameter_groups": [{"match": [...], "lr_scale": 1.0}]'
        )

"""State in and out of a plain optimizer: full replicas, and DeepSpeed's stage 0.

Nothing here is collective: every rank holds everything, and reads everything back from the same files. A ``ParameterView`` whose
``whole`` gathers makes it so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsframe.checkpoint.state import ParameterState, SavedState, compare, full_precision, put_scalars, split
from dsframe.errors import CheckpointError


@dataclass(frozen=True)
class ParameterView:
    """View of a parameter's state: in a tensor of its own, or in a piece of a flat tensor."""

    name: str
    shape: Sequence[int]
    master: Tensor
    """The tensor that the optimizer updates; the key of its state."""
    start: int | None = None
    """First element in a flat ``master``; None where the master is this parameter's alone."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def cut(self, tensor: Tensor) -> Tensor:
        """This parameter's piece of the master, or of one of the optimizer's tensors about it: a view."""
        if self.start is None:
            return tensor
        return tensor.narrow(0, self.start, self.numel).view(self.shape)

    def whole(self, piece: Tensor) -> Tensor:
        """Returns what ``cut`` returns, in full shape and in fp32 or wider."""
        return piece.to(full_precision(piece.dtype))

    def share(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor in full shape, to be copied into what ``cut`` returns."""
        return whole

    def moment(self, whole: Tensor) -> Tensor:
        """Zeros, laid out as the optimizer keeps ``whole`` about this parameter. Raises CheckpointError where it cannot."""
        if tuple(whole.shape) == tuple(self.shape):
            return torch.zeros_like(self.master, requires_grad=False)
        if self.start is not None:
            raise CheckpointError(f"{self.name}: the optimizer's {list(whole.shape)} cannot be cut into shares")
        return torch.zeros(whole.shape, dtype=self.master.dtype, device=self.master.device)


def read(
    slots: Iterable[ParameterView], frozen: Iterable[ParameterView], optimizer: torch.optim.Optimizer
) -> Iterator[ParameterState]:
    """Each parameter's state, in fp32, views of the living one where that is whole; the ``frozen`` ones have a weight alone."""
    for slot in slots:
        moments, scalars = split(optimizer.state.get(slot.master, {}), slot.master.shape)
        weight = slot.whole(slot.cut(slot.master.detach()))
        full = {key: slot.whole(slot.cut(one)) for key, one in moments.items()}
        yield ParameterState(slot.name, weight, full, scalars)
    for slot in frozen:
        yield ParameterState(slot.name, slot.whole(slot.cut(slot.master.detach())), {}, {})


@torch.no_grad()
def write(
    slots: Sequence[ParameterView], frozen: Sequence[ParameterView], optimizer: torch.optim.Optimizer, saved: SavedState
) -> None:
    """Puts saved state back, in place where there is some. Raises CheckpointError where the models differ."""
    compare("parameter", {slot.name: tuple(slot.shape) for slot in (*slots, *frozen)}, saved.shapes)
    groups = {id(master): group for group in optimizer.param_groups for master in group["params"]}
    shared: dict[int, dict[str, float]] = {}
    for slot in slots:
        one = saved.parameter(slot.name)
        slot.cut(slot.master.detach()).copy_(slot.share(one.weight))
        if not one.moments and not one.scalars:
            if slot.start is None:
                optimizer.state.pop(slot.master, None)
            continue
        held = optimizer.state[slot.master]
        for key, value in one.moments.items():
            if key not in held or held[key] is None:
                held[key] = slot.moment(value)
            slot.cut(held[key]).copy_(slot.share(value))
        same_step(slot.name, shared.setdefault(id(slot.master), dict(one.scalars)), one.scalars)
        put_scalars(optimizer, held, one.scalars, groups[id(slot.master)], slot.master.device)
    for slot in frozen:
        slot.cut(slot.master.detach()).copy_(slot.share(saved.parameter(slot.name).weight))


def same_step(name: str, first: dict[str, float], own: object) -> None:
    """Raises CheckpointError where parameters that share one optimizer entry were saved with different step counts."""
    if first != own:
        raise CheckpointError(
            f"{name} has step count {own}, but its neighbours {first}: parameters have different step counts, and this engine "
            "keeps one; resume on an engine of full replicas (ddp, horovod, single)"
        )

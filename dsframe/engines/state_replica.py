"""State in and out of a plain optimizer: full replicas, and DeepSpeed's stage 0.

Nothing here is collective: every rank holds everything, and reads everything back from the same files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsframe.checkpoint.state import ParameterState, SavedState, compare, put_scalars, split
from dsframe.errors import CheckpointError


@dataclass(frozen=True)
class Slot:
    """Where a parameter's state is: in a tensor of its own, or in a piece of one flat tensor that several share."""

    name: str
    shape: Sequence[int]
    master: Tensor
    """What the optimizer updates; the key of its state."""
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


def read(
    slots: Iterable[Slot], frozen: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer
) -> Iterator[ParameterState]:
    """Each parameter's state, as views of the living one, in fp32; then the ``frozen`` ones, which have a weight alone."""
    for slot in slots:
        moments, scalars = split(optimizer.state.get(slot.master, {}))
        weight = slot.cut(slot.master.detach()).float()
        yield ParameterState(slot.name, weight, {key: slot.cut(one).float() for key, one in moments.items()}, scalars)
    for name, parameter in frozen:
        yield ParameterState(name, parameter.detach().float(), {}, {})


@torch.no_grad()
def write(
    slots: Sequence[Slot],
    frozen: Sequence[tuple[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    saved: SavedState,
) -> None:
    """Puts saved state back, in place where there is some. Raises CheckpointError where the models differ."""
    own = {slot.name: tuple(slot.shape) for slot in slots} | {name: tuple(p.shape) for name, p in frozen}
    compare("parameter", own, saved.shapes)
    groups = {id(master): group for group in optimizer.param_groups for master in group["params"]}
    shared: dict[int, dict[str, float]] = {}
    for slot in slots:
        one = saved.parameter(slot.name)
        slot.cut(slot.master.detach()).copy_(one.weight)
        if not one.moments and not one.scalars:
            if slot.start is None:
                optimizer.state.pop(slot.master, None)
            continue
        held = optimizer.state[slot.master]
        for key, value in one.moments.items():
            if key not in held or held[key] is None:
                if slot.start is not None and value.shape != one.weight.shape:
                    raise CheckpointError(f"{slot.name}: the optimizer's {key} cannot be cut into shares")
                shape = value.shape if slot.start is None else slot.master.shape
                held[key] = torch.zeros(shape, dtype=slot.master.dtype, device=slot.master.device)
            slot.cut(held[key]).copy_(value)
        same_step(slot.name, shared.setdefault(id(slot.master), dict(one.scalars)), one.scalars)
        put_scalars(optimizer, held, one.scalars, groups[id(slot.master)], slot.master.device)
    for name, parameter in frozen:
        parameter.detach().copy_(saved.parameter(name).weight)


def same_step(name: str, first: dict[str, float], own: object) -> None:
    """Raises CheckpointError where parameters that share one optimizer entry were saved with different step counts."""
    if first != own:
        raise CheckpointError(
            f"{name} was updated {own} times over, its neighbours {first}: this engine keeps one count for all of them; "
            "resume on an engine of full replicas (ddp, horovod, single)"
        )

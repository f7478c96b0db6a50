"""Filling one of ZeRO's flat tensors, and the optimizer state that goes with it, from a saved state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsframe.engines.state_replica import same_step
from dsframe.model.state import Number, ParameterState, SavedState, put_scalars, split


class Piece(NamedTuple):
    """The part of one parameter that a flat tensor of this rank holds: ``size`` elements, none where others have all."""

    name: str
    start: int
    """Where it begins in the flat tensor."""
    size: int
    first: int
    """Its first element in the whole, flattened parameter."""


def fill(optimizer: torch.optim.Optimizer, flat: Tensor, pieces: list[Piece], saved: SavedState) -> None:
    """Weights, moments and step count of one flat tensor, from the saved ranges of its pieces, read one at a time."""
    held = optimizer.state[flat]
    common: dict[str, Number] | None = None
    anew = ""
    for name, start, size, first in pieces:
        parameter = saved.part(name, first, size)
        _make_moments(held, parameter, flat)
        if parameter.moments or parameter.scalars:
            common = dict(parameter.scalars) if common is None else common
            same_step(parameter.name, common, parameter.scalars)
        else:
            anew = parameter.name
        for target, source in (
            (flat, parameter.weight),
            *((held[key], moment) for key, moment in parameter.moments.items()),
        ):
            target.detach().narrow(0, start, size).copy_(source)
    if anew and common:
        same_step(anew, common, {})
    _set_scalars(optimizer, flat, common)


def _make_moments(held: dict[str, Any], parameter: ParameterState, flat: Tensor) -> None:
    """A fresh optimizer has no state yet: makes the tensors it would make at its first step."""
    for key in parameter.moments:
        if not isinstance(held.get(key), Tensor):
            held[key] = torch.zeros_like(flat.detach())


def _set_scalars(optimizer: torch.optim.Optimizer, flat: Tensor, scalars: dict[str, Number] | None) -> None:
    """The numbers, such as the step count, that go with one flat tensor. Without any saved, as before the first update."""
    held = optimizer.state[flat]
    if not held and not scalars:
        optimizer.state.pop(flat)  # to be made at the first step
        return
    if scalars is None:
        moments, numbers = split(held, flat.shape, optimizer)
        for moment in moments.values():
            moment.zero_()
        scalars = {key: [0.0] if isinstance(number, list) else 0.0 for key, number in numbers.items()}
    put_scalars(optimizer, held, scalars, optimizer.param_groups[0], flat.device)

"""Fills one of ZeRO's flat tensors, and its optimizer state, from a saved state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsframe.engines.state_replica import same_step
from dsframe.model.state import Number, ParameterState, SavedState, put_scalars, split


class Piece(NamedTuple):
    """The part of one parameter in a flat tensor of this rank: ``size`` elements, 0 if other ranks have all."""

    name: str
    start: int
    """First element in the flat tensor."""
    size: int
    first: int
    """First element in the flattened parameter."""


def fill(optimizer: torch.optim.Optimizer, flat: Tensor, pieces: list[Piece], saved: SavedState) -> None:
    """Fills weights, moments and step count of one flat tensor from the saved ranges of its pieces, read one at a time."""
    held = optimizer.state[flat]
    common: dict[str, Number] | None = None
    new_parameter = ""
    for name, start, size, first in pieces:
        parameter = saved.part(name, first, size)
        _make_moments(held, parameter, flat)
        if parameter.moments or parameter.scalars:
            common = dict(parameter.scalars) if common is None else common
            same_step(parameter.name, common, parameter.scalars)
        else:
            new_parameter = parameter.name
        for target, source in (
            (flat, parameter.weight),
            *((held[key], moment) for key, moment in parameter.moments.items()),
        ):
            target.detach().narrow(0, start, size).copy_(source)
    if new_parameter and common:
        same_step(new_parameter, common, {})
    _set_scalars(optimizer, flat, common)


def _make_moments(held: dict[str, Any], parameter: ParameterState, flat: Tensor) -> None:
    """Creates the state tensors that a new optimizer would create at its first step."""
    for key in parameter.moments:
        if not isinstance(held.get(key), Tensor):
            held[key] = torch.zeros_like(flat.detach())


def _set_scalars(optimizer: torch.optim.Optimizer, flat: Tensor, scalars: dict[str, Number] | None) -> None:
    """Sets the numbers of one flat tensor, such as the step count. Without saved ones, as before the first update."""
    held = optimizer.state[flat]
    if not held and not scalars:
        optimizer.state.pop(flat)  # created at the first step
        return
    if scalars is None:
        moments, numbers = split(held, flat.shape, optimizer)
        for moment in moments.values():
            moment.zero_()
        scalars = {key: [0.0] if isinstance(number, list) else 0.0 for key, number in numbers.items()}
    put_scalars(optimizer, held, scalars, optimizer.param_groups[0], flat.device)

"""Memory-centric tiling (Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.3): a linear layer as several small ones.

ZeRO-3 gathers parameters whole, so the largest layer decides how much memory a step takes; tiles it gathers one by one. Outside
of the engine nobody sees them: state goes in and out under the layer's own name, in its full shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.config.schema.settings_model import Tiling
from dsframe.errors import ConfigError, Problem
from dsframe.model import switches
from dsframe.model.state import EngineState, ParameterState, SavedState, SavedView, narrowed


@dataclass(frozen=True)
class Tile:
    """Where a piece lies in the whole weight (two ranges) or bias (one)."""

    whole: str
    slices: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the piece."""
        return tuple(part.stop - part.start for part in self.slices)


@dataclass(frozen=True)
class Tiles:
    """Every piece by its own name, and the shapes of the wholes."""

    pieces: Mapping[str, Tile]
    shapes: Mapping[str, tuple[int, ...]]

    def join(self, state: EngineState) -> EngineState:
        """``state`` with whole parameters in place of the pieces: a whole comes when its last piece has come."""
        return replace(state, parameters=self._joined(state.parameters)) if self.pieces else state

    def cut(self, saved: SavedState) -> SavedState:
        """``saved`` as if it had been written in pieces."""
        return _Cut(saved, self) if self.pieces else saved

    def _joined(self, parameters: Any) -> Iterator[ParameterState]:
        missing = {whole: sum(piece.whole == whole for piece in self.pieces.values()) for whole in self.shapes}
        begun: dict[str, ParameterState] = {}
        for parameter in parameters:
            tile = self.pieces.get(parameter.name)
            if tile is None:
                yield parameter
                continue
            if tile.whole not in begun:
                empty = {key: self._empty(tile.whole, moment) for key, moment in parameter.moments.items()}
                begun[tile.whole] = ParameterState(
                    tile.whole, self._empty(tile.whole, parameter.weight), empty, dict(parameter.scalars)
                )
            whole = begun[tile.whole]
            whole.weight[tile.slices] = parameter.weight
            for key, moment in parameter.moments.items():
                whole.moments[key][tile.slices] = moment
            missing[tile.whole] -= 1
            if not missing[tile.whole]:
                yield begun.pop(tile.whole)

    def _empty(self, whole: str, like: Tensor) -> Tensor:
        return torch.empty(self.shapes[whole], dtype=like.dtype, device=like.device)


class _Cut(SavedView):
    """A saved state, seen in pieces."""

    def __init__(self, saved: SavedState, tiles: Tiles) -> None:
        super().__init__(saved)
        self._tiles = tiles
        self._last: ParameterState | None = None

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        shapes = {name: shape for name, shape in self._saved.shapes.items() if name not in self._tiles.shapes}
        for name, tile in self._tiles.pieces.items():
            kept = self._saved.shapes.get(tile.whole)
            if kept is not None:  # of another model where the shape is not ours: let that be seen
                shapes[name] = tile.shape if tuple(kept) == self._tiles.shapes[tile.whole] else kept
        return shapes

    def parameter(self, name: str) -> ParameterState:
        tile = self._tiles.pieces.get(name)
        if tile is None:
            return self._saved.parameter(name)
        if self._last is None or self._last.name != tile.whole:  # pieces of one whole come one after another
            self._last = self._saved.parameter(tile.whole)
        parameter = self._last
        moments = {key: moment[tile.slices].contiguous() for key, moment in parameter.moments.items()}
        return ParameterState(name, parameter.weight[tile.slices].contiguous(), moments, parameter.scalars)

    def part(self, name: str, first: int, size: int) -> ParameterState:
        if name not in self._tiles.pieces:
            return self._saved.part(name, first, size)
        return narrowed(self.parameter(name), first, size)


def tile(model: nn.Module, wanted: Tiling | None, make: Callable[..., Any]) -> Tiles:
    """Replaces the layers that ``wanted`` names, in place, weights included. ``make``: ``deepspeed.zero.TiledLinear``.

    Draws no random numbers. Raises ConfigError for a layer that cannot be cut so, or whose weight others use too.
    """
    pieces: dict[str, Tile] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    if wanted is None or wanted.in_splits == wanted.out_splits == 1:
        return Tiles(pieces, shapes)
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for name, linear in switches.linears(model, wanted.modules).items():
        if any(uses[id(parameter)] > 1 for parameter in linear.parameters()):
            raise _wrong(f"{name} shares its weight with another layer", "leave it out")
        if wanted.in_splits > linear.in_features or wanted.out_splits > linear.out_features:
            shape = f"{linear.in_features} inputs and {linear.out_features} outputs"
            raise _wrong(f"{name} has only {shape}", "cut it less often")
        with torch.random.fork_rng():
            tiled = make(
                linear.in_features, linear.out_features, bias=linear.bias is not None,
                in_splits=wanted.in_splits, out_splits=wanted.out_splits, init_linear=linear,
                device=linear.weight.device, dtype=linear.weight.dtype,
            )  # fmt: skip
        for key, parameter in tiled.named_parameters():
            _, row, column, attribute = key.split(".")
            rows = slice(tiled.out_parts[int(row)], tiled.out_parts[int(row) + 1])
            columns = slice(tiled.in_parts[int(column)], tiled.in_parts[int(column) + 1])
            whole = getattr(linear, attribute)
            parameter.requires_grad_(whole.requires_grad)
            pieces[f"{name}.{key}"] = Tile(f"{name}.{attribute}", (rows, columns) if attribute == "weight" else (rows,))
            shapes[f"{name}.{attribute}"] = tuple(whole.shape)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, tiled)
    return Tiles(pieces, shapes)


def _wrong(message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("error", "dsframe.model.tiling", message, remedy, code="model")])

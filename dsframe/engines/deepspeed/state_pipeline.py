"""State in and out of a pipeline, by the whole model's names on every rank. All of it is **collective**.

Each stage reads its own parameters as the other DeepSpeed engines do, one at a time, and sends each to the other stages of its
column (the ranks that together hold one model).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsframe.model.state import ParameterState, SavedState, SavedView, Shapes
from dsframe.values import Tensors


class Column:
    """The ranks that together hold one model: one of each stage."""

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, device: torch.device) -> None:
        """``group``: of torch.distributed (None: all), with ``ranks`` in the order of stages; ``rank`` is this process's."""
        self._group, self._ranks, self._rank, self._device = group, ranks, rank, device

    def parameters(self, local: Iterable[ParameterState], borrowed: frozenset[str]) -> Iterator[ParameterState]:
        """**Collective** to iterate. Every stage's parameters, in the order of stages; copies of an earlier stage's once."""
        for source in self._ranks:
            mine = iter(local) if source == self._rank else None
            while (parameter := self._next(mine, borrowed, source)) is not None:
                yield parameter

    def _next(
        self, mine: Iterator[ParameterState] | None, borrowed: frozenset[str], source: int
    ) -> ParameterState | None:
        parameter = (
            next((parameter for parameter in mine if parameter.name not in borrowed), None)
            if mine is not None
            else None
        )
        description = json.loads(self._text(_describe(parameter), source))
        if description is None:
            return None
        weight = self._tensor(parameter.weight if parameter else None, description["shape"], torch.float32, source)
        moments = {
            key: self._tensor(parameter.moments[key] if parameter else None, shape, torch.float32, source)
            for key, shape in description["moments"].items()
        }
        return parameter or ParameterState(description["name"], weight, moments, description["scalars"])

    def buffers(self, local: Tensors) -> Tensors:
        """**Collective.** Every stage's buffers, in the order of stages."""
        gathered: Tensors = {}
        for source in self._ranks:
            mine = source == self._rank
            kinds = {name: [list(b.shape), str(b.dtype).removeprefix("torch.")] for name, b in local.items()}
            for name, (shape, dtype) in json.loads(self._text(json.dumps(kinds), source)).items():
                sent = self._tensor(local[name] if mine else None, shape, getattr(torch, dtype), source)
                gathered.setdefault(name, sent)  # the first stage's, which runs it, where a later one shares the layer
        return gathered

    def _text(self, text: str, source: int) -> str:
        content = bytearray(text.encode())
        size = torch.tensor([len(content)], device=self._device)
        dist.broadcast(size, source, group=self._group)
        sent = torch.frombuffer(content, dtype=torch.uint8).to(self._device) if source == self._rank else None
        return bytes(self._tensor(sent, [int(size)], torch.uint8, source).cpu().numpy()).decode()

    def _tensor(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """``tensor`` of the ``source``, the only rank that has it. It travels as bytes: Gloo does not know every dtype."""
        if tensor is None:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        here = tensor.detach().to(self._device).contiguous()
        dist.broadcast(here.reshape(-1).view(torch.uint8), source, group=self._group)
        return here


def _describe(parameter: ParameterState | None) -> str:
    if parameter is None:
        return "null"
    moments = {key: list(moment.shape) for key, moment in parameter.moments.items()}
    return json.dumps(
        {
            "name": parameter.name,
            "shape": list(parameter.weight.shape),
            "moments": moments,
            "scalars": dict(parameter.scalars),
        }
    )


class Share(SavedView):
    """The part of a saved state that one stage holds, as a saved state."""

    def __init__(self, saved: SavedState, parameters: Iterable[str], buffers: Iterable[str]) -> None:
        super().__init__(saved)
        self._parameters, self._buffers = frozenset(parameters), frozenset(buffers)

    @property
    def shapes(self) -> Shapes:
        """Of the stage's parameters."""
        return {name: shape for name, shape in self._saved.shapes.items() if name in self._parameters}

    def buffers(self) -> Tensors:
        """The stage's."""
        return {name: buffer for name, buffer in self._saved.buffers().items() if name in self._buffers}

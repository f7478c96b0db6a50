"""Reads and writes the state of a pipeline, with the whole model's names on every rank. All of it is **collective**.

Each stage reads its parameters as the other DeepSpeed engines do, one at a time, and sends each to the other stages of
its column (the ranks that together hold one model).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from dsframe.model.state import ParameterState, SavedState, SavedView, Shapes
from dsframe.values import Tensors


class Column:
    """The ranks that together hold one model: one of each stage."""

    def __init__(self, group: Any, ranks: Sequence[int], rank: int) -> None:
        """``group``: of torch.distributed (None: all), with ``ranks`` in the order of stages; ``rank``: this process."""
        self._group, self._ranks, self._rank = group, ranks, rank

    def parameters(self, local: Iterable[ParameterState], borrowed: frozenset[str]) -> Iterator[ParameterState]:
        """**Collective** to iterate. Yields all parameters, stage by stage, without copies (``borrowed``)."""
        for source in self._ranks:
            mine = iter(local if source == self._rank else ())
            while True:
                parameter = next((parameter for parameter in mine if parameter.name not in borrowed), None)
                sent = self._sent(parameter and _copied(parameter), source)
                if sent is None:
                    break
                yield sent

    def buffers(self, local: Tensors) -> Tensors:
        """**Collective.** Returns every stage's buffers, in the order of stages."""
        gathered: Tensors = {}
        for source in self._ranks:
            for name, buffer in self._sent(_on_cpu(local), source).items():
                gathered.setdefault(name, buffer)  # the first stage's, if later stages share the layer
        return gathered

    def _sent(self, value: Any, source: int) -> Any:
        """**Collective.** Returns the ``value`` of rank ``source``."""
        box = [value]
        dist.broadcast_object_list(box, source, group=self._group)
        return box[0]


def _on_cpu(tensors: Tensors) -> Tensors:
    """Returns copies with separate storage, because the whole storage of a tensor is sent."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _copied(parameter: ParameterState) -> ParameterState:
    weight = _on_cpu({"": parameter.weight})[""]
    return replace(parameter, weight=weight, moments=_on_cpu(dict(parameter.moments)))


class Share(SavedView):
    """One stage's part of a saved state."""

    def __init__(self, saved: SavedState, parameters: Iterable[str], buffers: Iterable[str]) -> None:
        super().__init__(saved)
        self._parameters, self._buffers = frozenset(parameters), frozenset(buffers)

    @property
    def shapes(self) -> Shapes:
        """Shapes of the stage's parameters."""
        return {name: shape for name, shape in self._saved.shapes.items() if name in self._parameters}

    def buffers(self) -> Tensors:
        """Returns the stage's buffers."""
        return {name: buffer for name, buffer in self._saved.buffers().items() if name in self._buffers}

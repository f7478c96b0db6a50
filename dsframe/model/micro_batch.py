"""Defines a micro-batch: the input of one forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dsframe.tasks.task import Sum, Sums

if TYPE_CHECKING:
    from dsframe.data.sample_draws import SampleDraws

Inputs = Any
"""Inputs of the model: a tensor, a tuple (positional arguments) or a dict (keyword arguments)."""

Pair = tuple[Inputs, Any]
"""Inputs and targets of a batch."""

Measure = Callable[[Any, Any], Sums]
"""Computes sums from the outputs and targets of an evaluation batch."""

Terms = dict[str, Sum]
"""Values that a task returned with the loss, summed over the micro-batches of a step."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward and backward pass."""

    inputs: Inputs
    targets: Any
    weight: Tensor | float = 1.0
    """Factor on the loss: a number, or a 0-d float32 tensor on the device, which may be 0 and is 1 on average."""
    inspect: Callable[[Any, Any], None] | None = None
    """Called with outputs and targets before the backward pass."""
    draws: SampleDraws | None = None
    """Assigns the random numbers of the loss to samples."""

    @classmethod
    def of(cls, batches: Iterable[tuple[Inputs, Any]], weight: float = 1.0) -> Iterator[MicroBatch]:
        """Yields ``batches`` of inputs and targets, each with ``weight``."""
        return (cls(inputs, targets, weight) for inputs, targets in batches)


class Arguments(NamedTuple):
    """Inputs of a model that is called with positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

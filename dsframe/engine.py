"""The contract that every engine meets: one optimizer step.

Forward, backward and step as separate calls would be too small a seam: DeepSpeed's pipeline owns all
three and takes its own micro-batches. At the seam of one optimizer update every engine does the same
thing, and the trainer knows none of them.

Two rules make engines interchangeable. Every method is collective: all ranks call it, in the same
order, the same number of times. And nothing waits for the device unless it says so: a loss stays a
tensor until somebody reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from dsframe.errors import EngineError
from dsframe.model.built import BuiltModel
from dsframe.model.micro_batch import Measure, MicroBatch, Pair
from dsframe.model.plan import Plan
from dsframe.model.state import EngineState, SavedState
from dsframe.tasks.task import Sums
from dsframe.values import Tensors


@dataclass(frozen=True)
class StepResult:
    """One optimizer update, as this rank saw it."""

    loss: Tensor
    """0-d float32 on the device, float64 where the model is: mean over this rank's micro-batches.
    Reading it waits for the device."""
    learning_rate: float
    """The rate this update was made with."""
    gradient_norm: Tensor | float | None = None
    """Global L2 norm before clipping; None where the engine does not compute one."""
    skipped: bool = False
    """True if the update was left out because gradients were not finite: under fp16 loss scaling, on
    engines that always look (DeepSpeed from stage 1 on), and with "on_nonfinite": "skip". The same on
    every rank."""
    terms: Sums = field(default_factory=dict)
    """What the task's loss returned beside the loss, over this rank's micro-batches."""


class Engine(ABC):
    """How one process takes part in training. The constructor sets everything up, collectively."""

    plan: Plan
    built: BuiltModel = BuiltModel()
    """What is known of the model."""
    updates_in_place = True
    """True if the optimizer updates the model's own parameters; False if it has masters or shards."""

    @abstractmethod
    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises EngineError where the engine cannot do what the file asks for."""

    @abstractmethod
    def train_step(self, micro_batches: Iterator[MicroBatch]) -> StepResult:
        """**Collective.** One optimizer update from ``batch.accumulation_steps`` micro-batches."""

    @abstractmethod
    def eval_step(self, batch: Pair, measure: Measure | None) -> Sums:
        """**Collective.** Returns ``measure(outputs, targets)`` of ``batch``, with the model in evaluation mode.

        A rank that ran out of samples is given another rank's batch, and None or a ``measure`` that returns nothing: the model
        still runs where others wait for it, and the mapping is empty. Of the ranks that split one model, one measures and the
        others return an empty mapping; of those that share sequences, each measures its slice: sums over all ranks count every
        sample once.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """**Collective.** Encloses the :meth:`eval_step` of an evaluation: what ranks gather may stay from one to the next."""
        return nullcontext()

    def average(self, decay: float) -> None:
        """Moves the average of the weights towards them (``dsframe.model.ema.update``); for engines
        with feature "ema"."""
        raise EngineError(f'{self.description} keeps no average of the weights; remove "ema"')

    def averaged(self) -> AbstractContextManager[None]:
        """**Collective.** Inside, the model has the averages in place of its weights."""
        raise EngineError(f'{self.description} keeps no average of the weights; remove "ema"')

    @abstractmethod
    def buffers(self) -> Tensors:
        """Returns the persistent buffers that this rank holds, by name: the tensors themselves."""

    @abstractmethod
    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """**Collective.** Element-wise sum of ``values`` (float64, any one shape) over all ranks."""

    @abstractmethod
    def state(self) -> EngineState:
        """**Collective** to read to its end: each parameter by name, in full shape and fp32.

        Nothing that is whole on this rank is copied; the rest is gathered one parameter at a time, so
        beyond the engine's own memory it takes one parameter and its moments. Where ranks hold flat
        ranges of parameters, ``parameters`` is a ``ShardedParameters``, which is saved without
        gathering. Take no training step while reading.
        """

    @abstractmethod
    def load_state(self, saved: SavedState) -> None:
        """**Collective.** Continues from ``saved``, which is the same on every rank and may come from
        any engine.

        Replaces weights, optimizer state, buffers, the number of updates and the loss scale. Each
        rank reads what it holds, one parameter at a time: ``saved.part`` reads a range alone. Raises
        CheckpointError where the models differ.
        """

    @property
    @abstractmethod
    def description(self) -> str:
        """Returns the engine's name for the first line of a run: ``DeepSpeed ZeRO-3``."""

    @abstractmethod
    def close(self) -> None:
        """**Collective.** Leaves the process group. Nothing else may be called afterwards."""

"""The interface of every engine: one optimizer step.

Separate calls for forward, backward and step do not work for all engines: DeepSpeed's pipeline owns all three and takes
its micro-batches itself. One whole optimizer update means the same on every engine, and the trainer knows none of them.

Two rules make engines interchangeable. Every method is collective: all ranks call it, in the same order, the same
number of times. And no method waits for the device unless its docstring says so: a loss stays a tensor until it is
read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
    """Result of one optimizer update on this rank."""

    loss: Tensor
    """0-d float32 on the device (float64 if the model is): mean over this rank's micro-batches. Reading it waits for
    the device."""
    learning_rate: float
    """Learning rate of this update."""
    gradient_norm: Tensor | float | None = None
    """Global L2 norm before clipping; None if the engine does not compute it."""
    skipped: bool = False
    """True if the update was skipped because gradients were not finite: under fp16 loss scaling, on engines that always
    check (DeepSpeed from stage 1 on), and with "on_nonfinite": "skip". The same on every rank."""
    terms: Sums = field(default_factory=dict)
    """Terms that the task's loss returned with the loss, over this rank's micro-batches."""
    unused: Sequence[str] = ()
    """Parameters that losses so far did not use on any rank, and that the update changes all the same."""


class Engine(ABC):
    """One process's part in training. The constructor does the whole setup, collectively."""

    plan: Plan
    built: BuiltModel = BuiltModel()
    """Facts about the model."""
    updates_in_place = True
    """True if the optimizer updates the model's own parameters; False if it has master weights or shards."""

    @abstractmethod
    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises EngineError if the engine does not support what the file asks for."""

    @abstractmethod
    def train_step(self, micro_batches: Iterator[MicroBatch]) -> StepResult:
        """**Collective.** Makes one optimizer update from ``batch.accumulation_steps`` micro-batches."""

    @abstractmethod
    def eval_step(self, batch: Pair, measure: Measure | None) -> Sums:
        """**Collective.** Returns ``measure(outputs, targets)`` of ``batch``, with the model in evaluation mode.

        A rank that has no samples left receives another rank's batch, and None or a ``measure`` that returns nothing:
        the model still runs, because other ranks wait for it, and the result is empty. If ranks split one model, one
        measures and the others return an empty mapping. If ranks split sequences, each measures its slice. Sums over
        all ranks therefore count every sample once.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """**Collective.** Encloses the :meth:`eval_step` calls of an evaluation, which may keep gathered weights."""
        return nullcontext()

    def average(self, decay: float) -> None:
        """Updates the moving average of the weights (``dsframe.model.ema.update``); for engines with feature "ema"."""
        raise EngineError(f'{self.description} keeps no average of the weights; remove "ema"')

    def averaged(self) -> AbstractContextManager[None]:
        """**Collective.** Inside, the model has the averages in place of its weights."""
        raise EngineError(f'{self.description} keeps no average of the weights; remove "ema"')

    @abstractmethod
    def buffers(self) -> Tensors:
        """Returns the persistent buffers of this rank by name: the tensors themselves, not copies."""

    @abstractmethod
    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """**Collective.** Returns the element-wise sum of ``values`` (float64, of any one shape) over all ranks."""

    @abstractmethod
    def state(self) -> EngineState:
        """Returns each parameter by name, in full shape and fp32. **Collective**: all ranks must read it to its end.

        What this rank holds whole is not copied. Everything else is gathered one parameter at a time, so the extra
        memory is one parameter and its moments. If ranks hold flat ranges of parameters, ``parameters`` is a
        ``ShardedParameters``, which is saved without gathering. Make no training step while reading.
        """

    @abstractmethod
    def load_state(self, saved: SavedState) -> None:
        """**Collective.** Continues from ``saved``, which is the same on every rank and may come from any engine.

        Replaces weights, optimizer state, buffers, the number of updates and the loss scale. Each rank reads what it
        holds, one parameter at a time; ``saved.part`` reads only a range. Raises CheckpointError if the models differ.
        """

    @property
    @abstractmethod
    def description(self) -> str:
        """Name of the engine for the first line of a run: ``DeepSpeed ZeRO-3``."""

    @abstractmethod
    def close(self) -> None:
        """**Collective.** Leaves the process group. No other method may be called afterwards."""

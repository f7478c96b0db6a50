"""What a user calls in the middle of a training: at each step, log line, evaluation, checkpoint, and at the end.

Hooks look on: what they are given cannot be changed through it, and what they return is not looked at. They
are called on all ranks together, so they may communicate. One that raises ends the run with the file and line
of the mistake; one that hangs is found by the watchdog, as any other code of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from dsframe.results import Summary


@dataclass(frozen=True)
class RunView:
    """Where the training stands."""

    step: int
    """Optimizer steps that have been made, counted from 1."""
    total_steps: int
    epoch: float
    """Passes over the data so far."""
    learning_rate: float
    """The rate of the last update."""
    loss: Tensor | None
    """0-d, on the device: mean over this rank's micro-batches of the last step. Reading it waits for the device. None before the
    first step of this process."""
    rank: int
    world_size: int
    directory: Path
    """The run's directory. Rank 0 alone should write there."""
    copy_model: Callable[[bool, bool], nn.Module | None] = lambda averages, all_ranks: None
    """Makes what :meth:`model` returns."""

    def model(self, *, averages: bool = False, all_ranks: bool = False) -> nn.Module | None:
        """**Collective**, so call it on every rank: a copy of the model as it is now, on the CPU and in evaluation mode, on rank 0;
        None on the others unless ``all_ranks``. ``averages``: the averages of the weights ("ema") in the place of them. The copy
        takes the memory of a whole model in fp32; of sharded weights one parameter at a time is gathered. Not inside of
        :meth:`Hooks.on_evaluation_batch`.
        """
        return self.copy_model(averages, all_ranks)


class Hooks:
    """Override what you need; what is not overridden costs nothing. Every method is called on all ranks, in the same order."""

    def on_start(self, run: RunView) -> None:
        """Before the first step of these processes, at a resume too: ``run.step`` steps have been made."""

    def on_step(self, run: RunView) -> None:
        """After each optimizer step."""

    def on_log(self, run: RunView, figures: Mapping[str, float]) -> None:
        """After each step that is logged: ``loss``, ``learning_rate``, and what the loss returned beside itself."""

    def on_evaluation_batch(self, run: RunView, outputs: Any, targets: Any) -> None:
        """After each batch of an evaluation, to save samples and pictures: the model's outputs as metrics see them. Only on ranks
        that have samples in this batch and hold the outputs: do nothing here that other ranks have to join."""

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """After each evaluation. The metrics are of all validation samples, the same on every rank."""

    def on_checkpoint(self, run: RunView, path: Path) -> None:
        """After each save. With ``"asynchronous": true`` the checkpoint may still be on its way to ``path``."""

    def on_end(self, run: RunView, summary: Summary) -> None:
        """After the last step, its evaluation and its checkpoint. Not after an error."""

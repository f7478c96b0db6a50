"""User callbacks: at each step, log line, evaluation and checkpoint, and at the end.

Hooks only observe: their arguments cannot change the training, and return values are ignored. All ranks call them
together, so they may communicate. If a hook raises, the run ends and reports the file and line. If a hook hangs, the
watchdog detects it, as in any other user code.
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
    """State of the training."""

    step: int
    """Number of completed optimizer steps."""
    total_steps: int
    epoch: float
    """Passes over the data so far."""
    learning_rate: float
    """Learning rate of the last update."""
    loss: Tensor | None
    """Loss of the last step: 0-d, on the device, mean over this rank's micro-batches. Reading it waits for the device.
    None before the first step of this process."""
    rank: int
    world_size: int
    directory: Path
    """The run's directory. Only rank 0 should write there."""
    copy_model: Callable[[bool, bool], nn.Module | None] = lambda averages, all_ranks: None
    """Creates the result of :meth:`model`."""

    def model(self, *, averages: bool = False, all_ranks: bool = False) -> nn.Module | None:
        """**Collective**, so call it on every rank. Returns a copy of the current model, on the CPU and in evaluation
        mode, on rank 0; None on the others unless ``all_ranks``. ``averages``: take the averages of the weights ("ema")
        in place of the weights. The copy takes the memory of a whole model in fp32; sharded weights are gathered one
        parameter at a time. Do not call it in :meth:`Hooks.on_evaluation_batch`."""
        return self.copy_model(averages, all_ranks)


class Hooks:
    """Override what you need; the rest costs nothing. All ranks call every method in the same order."""

    def on_start(self, run: RunView) -> None:
        """Before the first step of these processes, also on resume: ``run.step`` steps are done."""

    def on_step(self, run: RunView) -> None:
        """After each optimizer step."""

    def on_log(self, run: RunView, figures: Mapping[str, float]) -> None:
        """After each logged step: ``loss``, ``learning_rate``, and the terms that the loss returned."""

    def on_evaluation_batch(self, run: RunView, outputs: Any, targets: Any) -> None:
        """After each batch of an evaluation, to save samples and pictures: the model's outputs as metrics see them.
        Called only on ranks that have samples in this batch and hold the outputs, so do not communicate here."""

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """After each evaluation. The metrics cover all validation samples and are the same on every rank."""

    def on_checkpoint(self, run: RunView, path: Path) -> None:
        """After each save. With ``"asynchronous": true`` the checkpoint at ``path`` may not be complete yet."""

    def on_end(self, run: RunView, summary: Summary) -> None:
        """After the last step, its evaluation and its checkpoint. Not called after an error."""

"""Ends a training whose loss or gradients are no longer finite."""

from __future__ import annotations

from typing import NoReturn

from dsframe.cluster.exchange import any_rank
from dsframe.engine import Engine, StepResult
from dsframe.engines import precision
from dsframe.errors import TrainingError
from dsframe.events import Listener, Training
from dsframe.guard.nonfinite import FirstNonFinite, diagnose_nonfinite

IF_NO_ITEMS = (
    "if the loss is a mean that may have no items (all labels ignored), return their number from loss_weight(targets)"
)
SKIPS_IN_A_ROW = 50
"""Number of consecutive skipped updates that ends a training, which then does not recover by itself."""


class FiniteCheck(Listener):
    """Counts the skipped updates. Does not wait for the device."""

    def __init__(self, engine: Engine) -> None:
        plan = engine.plan
        self._engine = engine
        self._stops = plan.config.settings.on_nonfinite == "stop"
        self._scales_losses = precision.scales_losses(plan.config, plan.device)
        self._first = FirstNonFinite(plan.device)
        self._row = 0

    def on_step(self, training: Training, result: StepResult) -> None:
        """**Collective** if it fails. Raises TrainingError."""
        self._row = self._row + 1 if result.skipped else 0
        training.skipped_steps += result.skipped
        if result.skipped and self._scales_losses and self._row < SKIPS_IN_A_ROW:
            return  # the next loss scale is lower, unless it is fixed
        if self._row == 1:
            self._first = FirstNonFinite(self._engine.plan.device)  # forget steps that were skipped earlier
        self._first.look(training.step, result.loss, result.gradient_norm)
        if not result.skipped:
            return
        if self._stops or self._row == SKIPS_IN_A_ROW:
            self.fail(training)
        training.progress.say(
            f"step {training.step}: gradients are not finite, update left out ({training.skipped_steps} so far)"
        )

    def check_before_save(self, training: Training) -> None:
        """**Collective.** Raises TrainingError, because a checkpoint with NaN would replace good ones."""
        if self._stops and any_rank(self._engine, bool(self._first.exists())):
            self.fail(training)

    def fail(self, training: Training) -> NoReturn:
        """**Collective.** Raises TrainingError, which names what is not finite."""
        cause = diagnose_nonfinite(self._engine, training.loader, self._first, training.step)
        raise TrainingError(
            f'step {training.step}: {cause}; {IF_NO_ITEMS}; or leave such updates out: "on_nonfinite": "skip"'
        )

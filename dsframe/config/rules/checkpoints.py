"""Rules about the checkpoints that the run keeps."""

from __future__ import annotations

from fractions import Fraction

from dsframe.config.resolve import epochs
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.base import Interval

_CHECKPOINTS = "dsframe.checkpoints"


def check(context: RuleContext) -> None:
    """Reports keys without effect on checkpoints, which the user would otherwise notice only after the run."""
    settings, checkpoints = context.settings, context.settings.checkpoints
    if checkpoints.form is not None:
        context.no_effect(f"{_CHECKPOINTS}.form", "has no effect: checkpoints have one form")
    saved, evaluated = checkpoints.every_steps, settings.eval_every_steps
    if isinstance(saved, Interval) and evaluated is None:
        evaluated = Interval(epochs=1)  # its default
    if checkpoints.keep_best is not None and saved and evaluated and type(saved) is type(evaluated):
        ratio = epochs.steps(saved, Fraction(1)) / epochs.steps(evaluated, Fraction(1))
        if ratio.denominator != 1:
            message = f"only 1 of {ratio.denominator} checkpoints is evaluated, and only those can be the best"
            remedy = "make every_steps a multiple of eval_every_steps"
            context.no_effect(f"{_CHECKPOINTS}.keep_best", message, remedy)

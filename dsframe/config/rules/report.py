"""Rules about what the run keeps."""

from __future__ import annotations

from fractions import Fraction

from dsframe.config.resolve import epochs
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.base import Interval

METRICS = {
    "vision": ("loss", "accuracy"),
    "image-classification": ("loss", "accuracy"),
    "language": ("loss", "bits_per_byte", "accuracy"),
    "causal-language-model": ("loss", "bits_per_token", "accuracy"),
}
"""What evaluation reports, by the task's name; a user's own task says so when it runs."""
_CHECKPOINTS = "dsframe.checkpoints"


def check(context: RuleContext) -> None:
    """Report what is wrong with the kept checkpoints."""
    _checkpoints(context)


def _checkpoints(context: RuleContext) -> None:
    """Report keys that keep no checkpoint: else the user would find out only after the run."""
    settings, checkpoints = context.settings, context.settings.checkpoints
    if checkpoints.form is not None:
        context.no_effect(f"{_CHECKPOINTS}.form", "has no effect: checkpoints have one form")
    _metric(context, f"{_CHECKPOINTS}.keep_best", checkpoints.keep_best)
    _metric(context, "dsframe.stop.metric", settings.stop.metric if settings.stop else None)
    schedule = context.file.scheduler
    _metric(context, "scheduler.params.metric", schedule.params.get("metric") if schedule else None)
    saved, evaluated = checkpoints.every_steps, settings.eval_every_steps
    if isinstance(saved, Interval) and evaluated is None:
        evaluated = Interval(epochs=1)  # its default
    if checkpoints.keep_best is not None and saved and evaluated and type(saved) is type(evaluated):
        ratio = epochs.steps(saved, Fraction(1)) / epochs.steps(evaluated, Fraction(1))
        if ratio.denominator != 1:
            message = f"only 1 of {ratio.denominator} checkpoints is evaluated, and only those can be the best"
            remedy = "make every_steps a multiple of eval_every_steps"
            context.no_effect(f"{_CHECKPOINTS}.keep_best", message, remedy)


def _metric(context: RuleContext, path: str, wanted: str | None) -> None:
    """Report a metric, such as ``loss:min``, that the evaluation of the file's task does not have."""
    if "task" not in context.settings.model_fields_set:
        return  # a script brings its own task
    metric, known = (wanted or "").partition(":")[0], METRICS.get(context.task)
    if wanted and known and metric not in known:
        context.conflict(path, f"the task's evaluation has no metric {metric}", f"choose one of {', '.join(known)}")

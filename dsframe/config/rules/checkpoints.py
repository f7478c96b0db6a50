"""Rules about which of a run's own checkpoints stay, and about the metrics that decide it or the run's end."""

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


def check(context: RuleContext) -> None:
    """Report keys that keep no checkpoint: else the user would find out only after the run."""
    settings = context.file.dsframe
    wanted, base = settings.checkpoints, ("dsframe", "checkpoints")
    for key in ("keep_best", "keep_every"):
        if getattr(wanted, key) is not None and wanted.every_steps is None:
            message = "has no effect: only the last step is saved"
            context.no_effect((*base, key), message, "write how often to save: every_steps")
    cut = context.file.zero_optimization.stage or context.file.pipeline.stages > 1
    shards = "zero3" in context.entry.supports and (cut or not context.by_deepspeed)
    if wanted.form == "sharded" and not shards:
        why = "has no effect: every rank holds all parameters, so each is written whole, by one rank"
        context.no_effect((*base, "form"), why)
    _metric(context, (*base, "keep_best"), wanted.keep_best)
    _metric(context, ("dsframe", "stop", "metric"), settings.stop.metric if settings.stop else None)
    if wanted.keep_best is None:
        return
    saved, evaluated = wanted.every_steps, settings.eval_every_steps
    if isinstance(saved, Interval) and evaluated is None:
        evaluated = Interval(epochs=1)  # its default
    if saved and evaluated and type(saved) is type(evaluated):
        ratio = epochs.steps(saved, Fraction(1)) / epochs.steps(evaluated, Fraction(1))
        if ratio.denominator != 1:
            message = f"only 1 of {ratio.denominator} checkpoints is evaluated, and only those can be the best"
            remedy = f"make every_steps ({_show(saved)}) a multiple of eval_every_steps ({_show(evaluated)})"
            context.no_effect((*base, "keep_best"), message, remedy)


def _metric(context: RuleContext, path: tuple[str, ...], wanted: str | None) -> None:
    """Report a metric, such as ``loss:min``, that the evaluation of the file's task does not have. A script brings its own task."""
    if "task" not in context.file.dsframe.model_fields_set:
        return
    metric, known = (wanted or "").partition(":")[0], METRICS.get(str(getattr(context.file.dsframe.task, "name", "")))
    if wanted and known and metric not in known:
        context.conflict(path, f"the task's evaluation has no metric {metric}", f"choose one of {', '.join(known)}")


def _show(every: int | Interval) -> str:
    return f"{every}" if isinstance(every, int) else f'{{"epochs": {every.epochs:g}}}'

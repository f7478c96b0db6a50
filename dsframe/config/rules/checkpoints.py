"""Rules about which of a run's own checkpoints stay."""

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
            context.no_effect(
                (*base, key), "has no effect: only the last step is saved", "write how often to save: every_steps"
            )
    if wanted.keep_best is None:
        return
    metric, known = wanted.keep_best.partition(":")[0], METRICS.get(str(getattr(settings.task, "name", "")))
    if known and metric not in known:
        remedy = f"choose one of {', '.join(known)}"
        context.conflict((*base, "keep_best"), f"the task's evaluation has no metric {metric}", remedy)
    saved, evaluated = wanted.every_steps, settings.eval_every_steps
    if isinstance(saved, Interval) and evaluated is None:
        evaluated = Interval(epochs=1)  # its default
    if saved and evaluated and type(saved) is type(evaluated):
        ratio = epochs.steps(saved, Fraction(1)) / epochs.steps(evaluated, Fraction(1))
        if ratio.denominator != 1:
            context.findings.warning(
                (*base, "keep_best"),
                f"only 1 of {ratio.denominator} checkpoints is evaluated, and only those can be the best",
                f"make every_steps ({_show(saved)}) a multiple of eval_every_steps ({_show(evaluated)})",
                code="no-effect",
            )


def _show(every: int | Interval) -> str:
    return f"{every}" if isinstance(every, int) else f'{{"epochs": {every.epochs:g}}}'

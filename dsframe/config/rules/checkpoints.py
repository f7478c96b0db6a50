"""Rules about which of a run's own checkpoints stay."""

from __future__ import annotations

from math import lcm

from dsframe.config.rules.context import RuleContext

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
    if wanted.every_steps and settings.eval_every_steps:
        both, saved = lcm(wanted.every_steps, settings.eval_every_steps), wanted.every_steps
        if both != saved:
            context.findings.warning(
                (*base, "keep_best"),
                f"only 1 of {both // saved} checkpoints is evaluated, and only those can be the best",
                f"make every_steps ({saved}) a multiple of eval_every_steps ({settings.eval_every_steps})",
                code="no-effect",
            )

"""Rules about which of a run's own checkpoints stay."""

from __future__ import annotations

from math import lcm

from dsframe.config.rule import Judge

METRICS = {
    "vision": ("loss", "accuracy"),
    "image-classification": ("loss", "accuracy"),
    "language": ("loss", "bits_per_byte", "accuracy"),
    "causal-language-model": ("loss", "bits_per_token", "accuracy"),
}
"""What evaluation reports, by the task's name; a user's own task says so when it runs."""


def judge(bench: Judge) -> None:
    """Without these, nothing is said: the run ends, and the checkpoint that was to be kept is gone."""
    settings = bench.file.dsframe
    wanted, base = settings.checkpoints, ("dsframe", "checkpoints")
    for key in ("keep_best", "keep_every"):
        if getattr(wanted, key) is not None and wanted.every_steps is None:
            bench.idle((*base, key), "has no effect: only the last step is saved", "say how often to save: every_steps")
    if wanted.keep_best is None:
        return
    metric, known = wanted.keep_best.partition(":")[0], METRICS.get(str(getattr(settings.task, "name", "")))
    if known and metric not in known:
        remedy = f"choose one of {', '.join(known)}"
        bench.conflict((*base, "keep_best"), f"the task's evaluation has no {metric}", remedy)
    if wanted.every_steps and settings.eval_every_steps:
        both, saved = lcm(wanted.every_steps, settings.eval_every_steps), wanted.every_steps
        if both != saved:
            bench.findings.warning(
                (*base, "keep_best"),
                f"of the checkpoints, at multiples of {saved}, only those at multiples of {both} are evaluated and can be the best",
                f"let every_steps ({saved}) be a multiple of eval_every_steps ({settings.eval_every_steps})",
                code="no-effect",
            )

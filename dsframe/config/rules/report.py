"""Rules about profilers, loggers, and what the run keeps."""

from __future__ import annotations

from fractions import Fraction

from dsframe.config.read.findings import Findings
from dsframe.config.resolve import epochs
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.base import Interval
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import Settings

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


def check_world(
    file: DeepSpeed, settings: Settings, world_size: int | None, total_steps: int | None, findings: Findings
) -> None:
    """Report profiles of ranks and steps that the run does not have."""
    profile, profiler = settings.profile, file.flops_profiler
    steps = settings.steps if total_steps is None else total_steps
    if steps is not None and profiler.enabled and profiler.profile_step >= steps:
        message = f"the profile comes after {profiler.profile_step} steps, but the run has only {steps}"
        remedy = f"write at most {steps - 1}"
        findings.error("flops_profiler.profile_step", message, remedy, code="conflict", at_value=True)
    if profile is not None and steps is not None and profile.steps > steps:
        parts = f"({profile.wait} + {profile.warmup} + {profile.active}) x {profile.repeat}"
        message = f"takes {parts} = {profile.steps} steps, but the run has only {steps}"
        findings.error("dsframe.profile", message, "shorten it", code="conflict")
    path, ranks = "dsframe.profile.ranks", profile.ranks if profile else "all"
    if ranks == []:
        findings.error(path, "the list is empty", 'write [0] or "all"', code="value", at_value=True)
    if ranks and ranks != "all" and world_size is not None and max(ranks) >= world_size:
        message, remedy = f"there is no rank {max(ranks)} among {world_size} processes", "ranks are counted from 0"
        findings.error(path, message, f'{remedy}; write [0] or "all"', code="world", at_value=True)

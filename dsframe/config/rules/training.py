"""Rules about number formats and the ``dsframe`` section."""

from __future__ import annotations

from dsframe.config.features import MADE_HERE
from dsframe.config.read.findings import show
from dsframe.config.rules.context import RuleContext
from dsframe.engines.table import BUILT_IN


def check(context: RuleContext) -> None:
    """Reports what is wrong with number formats and the ``dsframe`` section."""
    fp16 = context.file.fp16
    for key, value in (("loss_scale_window", fp16.loss_scale_window), ("min_loss_scale", fp16.min_loss_scale)):
        if fp16.enabled and fp16.loss_scale == 0 and value <= 0:
            message = f"{value} must be above 0 with dynamic loss scaling: DeepSpeed raises"
            context.conflict(f"fp16.{key}", message, "raise it")
    _switched_off(context)
    _dsframe(context)


def _switched_off(context: RuleContext) -> None:
    for name in type(context.file).model_fields:
        written = context.raw.get(name)
        off = isinstance(written, dict) and written and "enabled" not in written
        if off and getattr(getattr(context.file, name), "enabled", True) is False and not context.fails(name):
            context.no_effect(name, '"enabled" is absent: it is false', 'write "enabled": true')


def _dsframe(context: RuleContext) -> None:
    settings, task = context.settings, context.settings.task
    for name in settings.pass_through:
        section = name.partition(".")[0]
        if section in MADE_HERE:
            message = f"{show(name)} is not forwarded: dsframe builds the {section} itself"
            context.conflict("dsframe.pass_through", message)
    context.imports("dsframe.task.name", context.task)
    for index, hook in enumerate(settings.hooks):
        context.imports(("dsframe", "hooks", index), hook)
    heads, width = getattr(task, "heads", None), getattr(task, "width", None)
    if isinstance(heads, int) and isinstance(width, int) and width % heads:
        context.conflict("dsframe.task.heads", f"{heads} does not divide width {width}", "choose another")
    for name in BUILT_IN:
        if context.wrote(f"dsframe.{name}") and settings.engine not in ("auto", name):
            context.note(f"dsframe.{name}", f'has no effect with engine "{settings.engine}"')
    if context.wrote("dsframe.engine_options") and not context.entry.options:
        message = f'has no effect: engine "{context.engine}" takes none'
        context.no_effect("dsframe.engine_options", message)

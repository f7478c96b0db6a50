"""What two of these engines refuse of a file beyond the features in their entries, with line and column, before training starts."""

from __future__ import annotations

from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.settings import LanguageTask


def model_parallel(context: RuleContext) -> None:
    """Report a file without stages, and a weight that two ranks would have to share."""
    stages, task = context.file.pipeline.stages, context.file.dsframe.task
    if stages == 1:
        message = "this engine puts one of pipeline.stages on each process, and pipeline.stages is 1"
        context.conflict(("dsframe", "engine"), message, 'add "pipeline": {"stages": 2}')
    elif isinstance(task, LanguageTask) and task.tie_embeddings and context.wrote("dsframe"):
        context.conflict(
            ("dsframe", "task", "tie_embeddings"), "not possible: the first and the last rank would share a weight",
            "write false, or choose deepspeed",
        )  # fmt: skip


def data_parallel(context: RuleContext) -> None:
    """Report switches that replace methods: nn.DataParallel copies a module, and the copy's method has the original's weights."""
    for key in ("activation_checkpointing", "compile"):
        if getattr(context.file.dsframe.model, key):
            path = ("dsframe", "model", key)
            context.conflict(
                path, "nn.DataParallel cannot copy a model with replaced methods", "remove it, or choose ddp"
            )

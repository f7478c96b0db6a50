"""Rules about sequence parallelism: which models support it, and which keys exclude it."""

from __future__ import annotations

from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.settings import CausalLanguageModelTask, LanguageTask

_SIZE = ("sequence_parallel_size",)
_TASK = ("dsframe", "task")


def check(context: RuleContext) -> None:
    """Report what is wrong with ``sequence_parallel_size``."""
    file = context.file
    size = file.sequence_parallel_size or 1
    if size < 2 or not context.by_deepspeed:
        return  # engines of full replicas shard nothing
    if file.pipeline.stages > 1:
        context.conflict(
            _SIZE, "not possible with a pipeline, whose stages exchange full sequences", "remove one of them"
        )
    if file.gradient_allreduce_op == "sum":
        context.conflict(
            _SIZE, "not possible with sums: gradients of slices are averaged", 'write "gradient_allreduce_op": "mean"'
        )
    if file.dsframe.model.compile:
        context.conflict(
            _SIZE, "not possible with dsframe.model.compile: a compiled block cannot communicate", "remove one of them"
        )
    if context.wrote("seq_parallel_communication_data_type"):
        context.no_effect(
            ("seq_parallel_communication_data_type",), "has no effect: communication_data_type counts for all gradients",
            'write "communication_data_type"',
        )  # fmt: skip
    if not context.wrote(*_TASK):
        return  # the file may belong to a program with a task of its own
    task = file.dsframe.task
    if isinstance(task, LanguageTask):
        for name, number in (("heads", task.heads), ("context", task.context)):
            if number % size:
                context.conflict(
                    (*_TASK, name), f"{number} is not divisible by sequence_parallel_size {size}", "choose another"
                )
    elif isinstance(task, CausalLanguageModelTask):
        heads = task.model.get("num_attention_heads") if isinstance(task.model, dict) else None
        numbers = ((("model", "num_attention_heads"), heads), (("context",), task.context))
        for key, count in numbers:
            if isinstance(count, int) and count % size:
                context.conflict(
                    (*_TASK, *key), f"{count} is not divisible by sequence_parallel_size {size}", "choose another"
                )
    elif ":" not in task.name:
        context.conflict(
            _SIZE,
            f'a model of the task "{task.name}" does not support sequence parallelism',
            'remove it, or train "language"',
        )

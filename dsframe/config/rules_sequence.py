"""Rules about sequence parallelism: which models can share sequences, and what does not go together with it."""

from __future__ import annotations

from dsframe.config.rule import Judge
from dsframe.config.settings import LanguageTask

_SIZE = ("sequence_parallel_size",)
_TASK = ("dsframe", "task")


def judge(bench: Judge) -> None:
    """Report what is wrong with ``sequence_parallel_size``."""
    file = bench.file
    size = file.sequence_parallel_size or 1
    if size < 2 or not bench.by_deepspeed:
        return  # engines of full replicas cut nothing
    if file.pipeline.stages > 1:
        bench.conflict(_SIZE, "a pipeline's stages pass whole sequences on", "take one out")
    if file.gradient_allreduce_op == "sum":
        bench.conflict(_SIZE, "gradients of slices are averaged, never summed", 'write "gradient_allreduce_op": "mean"')
    if file.dsframe.model.compile:
        bench.conflict(_SIZE, "a compiled block cannot exchange with other ranks", "take one out")
    if bench.wrote("seq_parallel_communication_data_type"):
        bench.idle(
            ("seq_parallel_communication_data_type",), "gradients go among all ranks by communication_data_type",
            'write "communication_data_type"',
        )  # fmt: skip
    if not bench.wrote(*_TASK):
        return  # the file may belong to a program with a task of its own
    task = file.dsframe.task
    if isinstance(task, LanguageTask):
        for name, number in (("heads", task.heads), ("context", task.context)):
            if number % size:
                bench.conflict(
                    (*_TASK, name), f"{number} is not divisible by sequence_parallel_size {size}", "choose another"
                )
    elif ":" not in task.name:
        bench.conflict(
            _SIZE, f'a model of the task "{task.name}" does not share sequences', 'take it out, or train "language"'
        )

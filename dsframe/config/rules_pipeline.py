"""Rules about cutting a model into pipeline stages, as far as the file says which model it is."""

from __future__ import annotations

import re

from dsframe.config.rule import Judge
from dsframe.config.settings import LanguageTask, VisionTask

_NO_CHAIN = ("googlenet", "inception_v3")
"""Of torchvision's classifiers."""
_REFERENCE = "reference-model-parallel"


def layers(task: object) -> list[str] | None:
    """The classes of the layers of one of dsframe's own models; None where only the model itself can tell.

    A tied output layer goes by the class of the layer whose weight it uses.
    """
    if isinstance(task, LanguageTask):
        return [
            "Tokens",
            "Positions",
            *["Block"] * task.layers,
            "LayerNorm",
            "Tokens" if task.tie_embeddings else "Output",
        ]
    if isinstance(task, VisionTask) and task.model == "cnn":
        return [*["Sequential"] * 4, "Linear"]
    return None


def judge(bench: Judge) -> None:
    """Report a model that makes no such stages, and what stages make of the rest of the file."""
    file, pipeline = bench.file, bench.file.pipeline
    if pipeline.stages == 1:
        if pipeline.activation_checkpoint_interval:
            bench.idle(
                ("pipeline", "activation_checkpoint_interval"), "has no effect without a pipeline: there are no stages",
                'write "activation_checkpointing": true under "model" of "dsframe"',
            )  # fmt: skip
        return
    if file.gradient_accumulation_steps is not None or file.train_micro_batch_size_per_gpu is None:
        micro, others = file.gradient_accumulation_steps or 1, pipeline.stages - 1
        bench.findings.note(
            ("pipeline", "stages"),
            f"each stage waits {others / (micro + others):.0%} of the time, as {micro} micro-batch{'es' * (micro > 1)} in a step "
            f"and {pipeline.stages} stages make it; more gradient_accumulation_steps make it less",
            code="slow",
        )
    if bench.wrote("dsframe") and (bench.by_deepspeed or bench.engine == _REFERENCE):
        _model(bench)


def _model(bench: Judge) -> None:
    pipeline, settings = bench.file.pipeline, bench.file.dsframe
    task = settings.task
    if bench.by_deepspeed and pipeline.activation_checkpoint_interval and settings.model.activation_checkpointing:
        bench.conflict(
            ("pipeline", "activation_checkpoint_interval"), "dsframe.model.activation_checkpointing does the same, once more",
            "keep one of them",
        )  # fmt: skip
    elsewhere = 'use "zero_optimization" or "tensor_parallel" instead, or another model'
    if task.name in ("causal-language-model", "image-classification"):
        bench.conflict(("pipeline", "stages"), "a model of transformers is one piece, and makes no stages", elsewhere)
    if isinstance(task, VisionTask) and task.model in _NO_CHAIN:
        bench.conflict(("pipeline", "stages"), f"{task.model} is no chain of layers, and makes no stages", elsewhere)
    found = layers(task)
    if found is None:
        return
    if pipeline.stages > len(found):
        bench.conflict(
            ("pipeline", "stages"), f"{pipeline.stages} stages, but the model has {len(found)} layers", "use fewer"
        )
    elif bench.engine == _REFERENCE:
        if isinstance(task, LanguageTask) and task.tie_embeddings:
            bench.conflict(
                ("dsframe", "task", "tie_embeddings"), "the first and the last rank would have to share a weight",
                "write false, or choose deepspeed",
            )  # fmt: skip
    elif pipeline.partition.lower().startswith("type:"):
        pattern = pipeline.partition.partition(":")[2]
        try:
            matches = sum(re.search(pattern, name, re.IGNORECASE) is not None for name in found)
        except re.error:
            return  # reported with the value
        if matches < pipeline.stages:
            bench.conflict(
                ("pipeline", "partition"), f'"{pattern}" matches {matches} layers, too few for {pipeline.stages} stages',
                f"their classes are {', '.join(sorted(set(found)))}",
            )  # fmt: skip

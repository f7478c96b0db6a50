"""Rules about pipeline stages, for models that the file describes."""

from __future__ import annotations

import re

from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.settings import CausalLanguageModelTask, LanguageTask, VisionTask

_NO_CHAIN = ("googlenet", "inception_v3")
"""Classifiers of torchvision that are no chain of layers."""


def layers(task: object) -> list[str] | None:
    """Return the classes of the layers of one of dsframe's own models; None if only the model itself can tell.

    A tied output layer has the class of the layer whose weight it uses.
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


def check(context: RuleContext) -> None:
    """Report models that cannot be split into so many stages, and keys that a pipeline excludes."""
    file, pipeline = context.file, context.file.pipeline
    if pipeline.stages == 1:
        if pipeline.activation_checkpoint_interval:
            context.no_effect(
                ("pipeline", "activation_checkpoint_interval"), "has no effect without a pipeline",
                'write "activation_checkpointing": true under "model" of "dsframe"',
            )  # fmt: skip
        return
    if file.gradient_accumulation_steps is not None or file.train_micro_batch_size_per_gpu is None:
        micro, others = file.gradient_accumulation_steps or 1, pipeline.stages - 1
        context.findings.note(
            ("pipeline", "stages"),
            f"pipeline bubble: each stage is idle {others / (micro + others):.0%} of the time",
            "raise gradient_accumulation_steps",
            code="slow",
        )
    if context.wrote("dsframe") and "pipeline" in context.entry.supports:
        _model(context)


def _packs(task: CausalLanguageModelTask) -> bool:
    """True if the rows are documents of their own."""
    if task.data is None:
        return False
    return task.data.packing in ("rows", "documents") or (task.data.packing is None and task.data.format != "text")


def _model(context: RuleContext) -> None:
    pipeline, settings = context.file.pipeline, context.file.dsframe
    task = settings.task
    if context.by_deepspeed and pipeline.activation_checkpoint_interval and settings.model.activation_checkpointing:
        context.conflict(
            ("pipeline", "activation_checkpoint_interval"),
            "recomputation is switched on twice, here and in dsframe.model.activation_checkpointing",
            "keep one of them",
        )  # fmt: skip
    elsewhere = 'use "zero_optimization" or "tensor_parallel" instead, or another model'
    if task.name == "image-classification" or (task.name == "causal-language-model" and not context.by_deepspeed):
        context.conflict(("pipeline", "stages"), "a model of transformers cannot be split into stages", elsewhere)
    if isinstance(task, CausalLanguageModelTask) and _packs(task):
        context.conflict(
            ("dsframe", "task", "data"),
            "not possible in a pipeline: a stage passes on one tensor only, but these rows also have a mask",
            'write "packing": "concatenate", or train without a pipeline',
        )  # fmt: skip
    if isinstance(task, VisionTask) and task.model in _NO_CHAIN:
        context.conflict(
            ("pipeline", "stages"), f"{task.model} cannot be split into stages: it is no chain of layers", elsewhere
        )
    found = layers(task)
    if found is None:
        return
    if pipeline.stages > len(found):
        context.conflict(
            ("pipeline", "stages"), f"{pipeline.stages} stages, but the model has {len(found)} layers", "use fewer"
        )
    elif context.by_deepspeed and pipeline.partition.lower().startswith("type:"):
        pattern = pipeline.partition.partition(":")[2]
        try:
            matches = sum(re.search(pattern, name, re.IGNORECASE) is not None for name in found)
        except re.error:
            return  # reported with the value
        if matches < pipeline.stages:
            context.conflict(
                ("pipeline", "partition"), f'"{pattern}" matches {matches} layers, too few for {pipeline.stages} stages',
                f"their classes are {', '.join(sorted(set(found)))}",
            )  # fmt: skip

"""Rules about a model that ranks share: pipeline stages, tensor parallelism.

What depends on the model, such as its layers and heads, is checked by the engine when it is built.
"""

from __future__ import annotations

import re

from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.settings import CausalLanguageModelTask

_TENSOR = "tensor_parallel.autotp_size"
_STAGES = "pipeline.stages"
_PARTITION = "pipeline.partition"
_PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")


def check(context: RuleContext) -> None:
    """Reports what is wrong with pipeline and tensor parallelism."""
    _pipeline(context)
    _tensor(context)


def _pipeline(context: RuleContext) -> None:
    """Reports pipeline bubbles and models that cannot be split into stages."""
    file, stages = context.file, context.file.pipeline.stages
    _partition(context)
    if stages > 1 and (file.gradient_accumulation_steps is not None or file.train_micro_batch_size_per_gpu is None):
        micro, others = file.gradient_accumulation_steps or 1, stages - 1
        message = f"pipeline bubble: each stage is idle {others / (micro + others):.0%} of the time"
        context.note(_STAGES, message, "raise gradient_accumulation_steps", code="slow")
    if stages > 1 and context.wrote("dsframe") and "pipeline" in context.entry.supports:
        _model(context)


def _partition(context: RuleContext) -> None:
    partition = context.file.pipeline.partition
    by_type, _, pattern = partition.partition(":")
    if by_type.lower() == "type":
        try:
            re.compile(pattern)
        except re.error as error:
            context.conflict(_PARTITION, f'"{partition}" is not a regular expression: {error}', "correct it")
    elif partition not in ("parameters", "uniform", "best"):
        message = f'"{partition}" is not a method of partitioning'
        context.conflict(_PARTITION, message, 'write "parameters", "uniform" or "type:REGEX"')


def _packs(task: CausalLanguageModelTask) -> bool:
    """True if each row holds complete documents."""
    if task.data is None:
        return False
    return task.data.packing in ("rows", "documents") or (task.data.packing is None and task.data.format != "text")


def _model(context: RuleContext) -> None:
    task = context.settings.task
    if isinstance(task, CausalLanguageModelTask):
        if not context.by_deepspeed:
            context.conflict(_STAGES, "a model of transformers cannot be split into stages", "choose another engine")
        if _packs(task):
            message = "not possible in a pipeline: a stage passes on one tensor only, but these rows also have a mask"
            remedy = 'write "packing": "concatenate", or train without a pipeline'
            context.conflict("dsframe.task.data", message, remedy)


def _tensor(context: RuleContext) -> None:
    tensor = context.file.tensor_parallel
    if tensor.tp.tp_size not in (1, max(1, tensor.autotp_size)):
        message = f"{tensor.tp.tp_size} != autotp_size {tensor.autotp_size}: DeepSpeed raises"
        context.conflict("tensor_parallel.tp.tp_size", message)
    if tensor.preset_model is not None and tensor.preset_model.lower() not in _PRESETS:
        message = f'"{tensor.preset_model}" is not a preset: DeepSpeed ignores it'
        context.conflict("tensor_parallel.preset_model", message, f"choose one of {', '.join(_PRESETS)}")
    heads = getattr(context.settings.task, "heads", None)
    if context.splits_layers and isinstance(heads, int) and heads % tensor.autotp_size:  # a shard has complete heads
        context.conflict(
            "dsframe.task.heads", f"{heads} is not divisible by autotp_size {tensor.autotp_size}", "choose another"
        )

"""Rules about a model that ranks share: pipeline stages, tensor parallelism, sequence parallelism."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.settings import CausalLanguageModelTask, LanguageTask, VisionTask

_TENSOR = "tensor_parallel.autotp_size"
_STAGES = "pipeline.stages"
_PARTITION = "pipeline.partition"
_PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")
_HAND_WRITTEN = 'describe in "partition_config" which layers are sharded, and how'
# What transformers 5 says nothing about, so that DeepSpeed refuses or guesses: the best known of them.
_WITHOUT_A_PLAN = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "bloom", "falcon", "codegen", "mpt", "vit")


def layers(task: object) -> list[str] | None:
    """Return the classes of the layers of one of dsframe's own models; None if only the model itself can tell.

    A tied output layer has the class of the layer whose weight it uses.
    """
    if isinstance(task, LanguageTask):
        last = "Tokens" if task.tie_embeddings else "Output"
        return ["Tokens", "Positions", *["Block"] * task.layers, "LayerNorm", last]
    if isinstance(task, VisionTask) and task.model == "cnn":
        return [*["Sequential"] * 4, "Linear"]
    return None


def check(context: RuleContext) -> None:
    """Report what is wrong with a model that ranks share."""
    _pipeline(context)
    _tensor(context)
    if context.splits_sequences:
        _sequence(context)


def _pipeline(context: RuleContext) -> None:
    """Report models that cannot be split into so many stages."""
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
    """True if the rows are documents of their own."""
    if task.data is None:
        return False
    return task.data.packing in ("rows", "documents") or (task.data.packing is None and task.data.format != "text")


def _model(context: RuleContext) -> None:
    pipeline, task = context.file.pipeline, context.settings.task
    if isinstance(task, CausalLanguageModelTask):
        if not context.by_deepspeed:
            context.conflict(_STAGES, "a model of transformers cannot be split into stages", "choose another engine")
        if _packs(task):
            message = "not possible in a pipeline: a stage passes on one tensor only, but these rows also have a mask"
            remedy = 'write "packing": "concatenate", or train without a pipeline'
            context.conflict("dsframe.task.data", message, remedy)
    names = layers(task)
    if names is None:
        return
    if pipeline.stages > len(names):
        context.conflict(_STAGES, f"{pipeline.stages} stages, but the model has {len(names)} layers", "use fewer")
    elif context.by_deepspeed and pipeline.partition.lower().startswith("type:") and not context.fails(_PARTITION):
        pattern = pipeline.partition.partition(":")[2]
        matches = sum(re.search(pattern, name, re.IGNORECASE) is not None for name in names)
        if matches < pipeline.stages:
            message = f'"{pattern}" matches {matches} layers, too few for {pipeline.stages} stages'
            context.conflict(_PARTITION, message, f"their classes are {', '.join(sorted(set(names)))}")


def _tensor(context: RuleContext) -> None:
    """Report what is wrong with ``tensor_parallel``."""
    tensor = context.file.tensor_parallel
    if tensor.tp.tp_size not in (1, max(1, tensor.autotp_size)):
        message = f"{tensor.tp.tp_size} != autotp_size {tensor.autotp_size}: DeepSpeed raises"
        context.conflict("tensor_parallel.tp.tp_size", message)
    if tensor.preset_model is not None and tensor.preset_model.lower() not in _PRESETS:
        message = f'"{tensor.preset_model}" is not a preset: DeepSpeed ignores it'
        context.conflict("tensor_parallel.preset_model", message, f"choose one of {', '.join(_PRESETS)}")
    if not context.splits_layers or context.fails("tensor_parallel"):
        return  # engines of full replicas shard nothing
    for path, heads in _heads(context):
        if heads % tensor.autotp_size:  # a shard has complete heads
            context.conflict(path, f"{heads} is not divisible by autotp_size {tensor.autotp_size}", "choose another")
    # A file without a task may belong to a program with its own.
    if context.wrote("dsframe.task") and tensor.partition_config is None and tensor.preset_model is None:
        _plan(context)


def _heads(context: RuleContext) -> list[tuple[str, int]]:
    task = context.file.dsframe.task
    heads = getattr(task, "heads", None)
    if isinstance(heads, int):
        return [("dsframe.task.heads", heads)]
    settings, in_file = _transformers(task), isinstance(getattr(task, "model", None), dict)
    return [
        (f"dsframe.task.model.{name}" if in_file else "dsframe.task.model", settings[name])
        for name in ("num_attention_heads", "num_key_value_heads")
        if type(settings.get(name)) is int
    ]


def _transformers(task: Any) -> Mapping[str, Any]:
    """Return the settings of a model of transformers: from the file, or from its folder."""
    model = getattr(task, "model", None)
    if isinstance(model, str) and task.name in ("causal-language-model", "image-classification"):
        try:
            model = json.loads(Path(model).expanduser().joinpath("config.json").read_text())
        except (OSError, ValueError):  # its absence is said when the task is built
            return {}
    return model if isinstance(model, dict) else {}


def _plan(context: RuleContext) -> None:
    """Report models that nobody says how to shard."""
    task = context.file.dsframe.task
    model_type = _transformers(task).get("model_type")
    if isinstance(task, VisionTask):
        context.conflict(_TENSOR, f'nothing says how to shard the model "{task.model}"', _HAND_WRITTEN)
    elif model_type in _WITHOUT_A_PLAN:
        message = f'neither transformers nor DeepSpeed says how to shard a model of type "{model_type}"'
        context.conflict(_TENSOR, message, _HAND_WRITTEN)


def _sequence(context: RuleContext) -> None:
    """Report what is wrong with ``sequence_parallel_size``."""
    task, size = context.settings.task, context.file.sequence_parallel_size or 1
    if not context.wrote("dsframe.task"):
        return  # the file may belong to a program with a task of its own
    if isinstance(task, LanguageTask):
        numbers: dict[str, Any] = {"heads": task.heads, "context": task.context}
    elif isinstance(task, CausalLanguageModelTask):
        heads = task.model.get("num_attention_heads") if isinstance(task.model, dict) else None
        numbers = {"model.num_attention_heads": heads, "context": task.context}
    else:
        numbers = {}
    for key, count in numbers.items():
        if isinstance(count, int) and count % size:
            message = f"{count} is not divisible by sequence_parallel_size {size}"
            context.conflict(f"dsframe.task.{key}", message, "choose another")
    if not numbers and ":" not in context.task:
        message = f'a model of the task "{context.task}" does not support sequence parallelism'
        context.conflict("sequence_parallel_size", message, 'remove it, or train "language"')

"""Rules about a model that ranks share: pipeline stages, tensor parallelism, sequence parallelism."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsframe.config.rules.context import RuleContext
from dsframe.config.rules.model import PER_TENSOR
from dsframe.config.schema.settings import CausalLanguageModelTask, LanguageTask, VisionTask

_TASK = ("dsframe", "task")
_TENSOR = ("tensor_parallel", "autotp_size")
_SEQUENCE = ("sequence_parallel_size",)
_NO_CHAIN = ("googlenet", "inception_v3")
"""Classifiers of torchvision that are no chain of layers."""
_HEADS = ("num_attention_heads", "num_key_value_heads")
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


def check_pipeline(context: RuleContext) -> None:
    """Report models that cannot be split into so many stages, and keys that a pipeline excludes."""
    file, pipeline = context.file, context.file.pipeline
    if pipeline.stages == 1:
        if pipeline.activation_checkpoint_interval:
            message = "has no effect without a pipeline"
            remedy = 'write "activation_checkpointing": true under "model" of "dsframe"'
            context.no_effect(("pipeline", "activation_checkpoint_interval"), message, remedy)
        return
    if file.gradient_accumulation_steps is not None or file.train_micro_batch_size_per_gpu is None:
        micro, others = file.gradient_accumulation_steps or 1, pipeline.stages - 1
        message = f"pipeline bubble: each stage is idle {others / (micro + others):.0%} of the time"
        context.findings.note(("pipeline", "stages"), message, "raise gradient_accumulation_steps", code="slow")
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
        message = "recomputation is switched on twice, here and in dsframe.model.activation_checkpointing"
        context.conflict(("pipeline", "activation_checkpoint_interval"), message, "keep one of them")
    elsewhere = 'use "zero_optimization" or "tensor_parallel" instead, or another model'
    if task.name == "image-classification" or (task.name == "causal-language-model" and not context.by_deepspeed):
        context.conflict(("pipeline", "stages"), "a model of transformers cannot be split into stages", elsewhere)
    if isinstance(task, CausalLanguageModelTask) and _packs(task):
        message = "not possible in a pipeline: a stage passes on one tensor only, but these rows also have a mask"
        remedy = 'write "packing": "concatenate", or train without a pipeline'
        context.conflict(("dsframe", "task", "data"), message, remedy)
    if isinstance(task, VisionTask) and task.model in _NO_CHAIN:
        message = f"{task.model} cannot be split into stages: it is no chain of layers"
        context.conflict(("pipeline", "stages"), message, elsewhere)
    found = layers(task)
    if found is None:
        return
    if pipeline.stages > len(found):
        message = f"{pipeline.stages} stages, but the model has {len(found)} layers"
        context.conflict(("pipeline", "stages"), message, "use fewer")
    elif context.by_deepspeed and pipeline.partition.lower().startswith("type:"):
        pattern = pipeline.partition.partition(":")[2]
        try:
            matches = sum(re.search(pattern, name, re.IGNORECASE) is not None for name in found)
        except re.error:
            return  # reported with the value
        if matches < pipeline.stages:
            message = f'"{pattern}" matches {matches} layers, too few for {pipeline.stages} stages'
            context.conflict(("pipeline", "partition"), message, f"their classes are {', '.join(sorted(set(found)))}")


def check_tensor(context: RuleContext) -> None:
    """Report what is wrong with ``tensor_parallel``."""
    size = context.file.tensor_parallel.autotp_size
    if size < 2 or not context.by_deepspeed or context.findings.fails(("tensor_parallel",)):
        return  # engines of full replicas shard nothing
    _heads(context, size)
    _cuts(context)
    file = context.file
    if file.zero_optimization.stage == 0 and (file.bf16.enabled or file.fp16.enabled):
        width = "bf16" if file.bf16.enabled else "fp16"
        message = f"not possible at stage 0 with {width}: DeepSpeed computes the gradient norm from one rank only"
        context.conflict(_TENSOR, message, 'write "zero_optimization": {"stage": 1}')
    kind = file.optimizer.type.lower() if file.optimizer else ""
    if kind in PER_TENSOR:
        message = f"{kind.capitalize()} computes each update from the full weight: shards would train differently"
        context.conflict(_TENSOR, message, "choose another optimizer")
    if (file.sequence_parallel_size or 1) > 1:
        context.conflict(_TENSOR, "DeepSpeed cannot combine tensor and sequence parallelism", "keep one of them")
    if file.tensor_parallel.vocab_parallel_lm_head or file.tensor_parallel.vocab_parallel_ce_backend != "torch":
        key = "vocab_parallel_lm_head" if file.tensor_parallel.vocab_parallel_lm_head else "vocab_parallel_ce_backend"
        message = "this needs the loss inside the model, which dsframe's tasks do not have"
        context.conflict(("tensor_parallel", key), message, "remove it")
    if file.dsframe.model.tiling is not None:
        message = "not possible with tensor parallelism: AutoTP does not know the tiles' names"
        context.conflict(("dsframe", "model", "tiling"), message, "remove it")


def _heads(context: RuleContext, size: int) -> None:
    """Report heads that ranks cannot divide: a shard has complete heads."""
    for path, heads in _written_heads(context):
        if heads % size:
            context.conflict(path, f"{heads} is not divisible by autotp_size {size}", "choose another")


def _written_heads(context: RuleContext) -> list[tuple[tuple[str, ...], int]]:
    task = context.file.dsframe.task
    ours = getattr(task, "heads", None)
    if isinstance(ours, int):
        return [((*_TASK, "heads"), ours)]
    settings = _settings(task)
    inside = isinstance(getattr(task, "model", None), dict)
    found = [(name, settings.get(name)) for name in _HEADS]
    return [
        ((*_TASK, "model", name) if inside else (*_TASK, "model"), heads)
        for name, heads in found
        if isinstance(heads, int) and not isinstance(heads, bool)
    ]


def _settings(task: Any) -> Mapping[str, Any]:
    """Return the settings of a model of transformers: from the file, or from its folder."""
    model = getattr(task, "model", None)
    if isinstance(model, dict):
        return model
    if isinstance(model, str) and getattr(task, "name", "") in ("causal-language-model", "image-classification"):
        try:
            read = json.loads(Path(model).expanduser().joinpath("config.json").read_text())
        except (OSError, ValueError):  # its absence is said when the task is built
            return {}
        return read if isinstance(read, dict) else {}
    return {}


def _cuts(context: RuleContext) -> None:
    """Report models that nobody says how to shard. A file without a task may belong to a program with its own."""
    if not context.wrote(*_TASK):
        return
    section, task = context.file.tensor_parallel, context.file.dsframe.task
    if section.partition_config is not None or section.preset_model is not None:
        return
    name = getattr(task, "name", "")
    kind = _settings(task).get("model_type")
    if name == "causal-language-model" and context.file.pipeline.stages > 1:
        context.conflict(_TENSOR, "nothing says how to shard the stages of a model of transformers", _HAND_WRITTEN)
    elif name == "vision":
        context.conflict(_TENSOR, f'nothing says how to shard the model "{getattr(task, "model", "")}"', _HAND_WRITTEN)
    elif kind in _WITHOUT_A_PLAN:
        message = f'neither transformers nor DeepSpeed says how to shard a model of type "{kind}"'
        context.conflict(_TENSOR, message, _HAND_WRITTEN)


def check_sequence(context: RuleContext) -> None:
    """Report what is wrong with ``sequence_parallel_size``."""
    file = context.file
    size = file.sequence_parallel_size or 1
    if size < 2 or not context.by_deepspeed:
        return  # engines of full replicas shard nothing
    if file.pipeline.stages > 1:
        message = "not possible with a pipeline, whose stages exchange full sequences"
        context.conflict(_SEQUENCE, message, "remove one of them")
    if file.gradient_allreduce_op == "sum":
        message = "not possible with sums: gradients of slices are averaged"
        context.conflict(_SEQUENCE, message, 'write "gradient_allreduce_op": "mean"')
    if file.dsframe.model.compile:
        message = "not possible with dsframe.model.compile: a compiled block cannot communicate"
        context.conflict(_SEQUENCE, message, "remove one of them")
    if context.wrote("seq_parallel_communication_data_type"):
        message = "has no effect: communication_data_type counts for all gradients"
        context.no_effect(("seq_parallel_communication_data_type",), message, 'write "communication_data_type"')
    if not context.wrote(*_TASK):
        return  # the file may belong to a program with a task of its own
    task = file.dsframe.task
    if isinstance(task, LanguageTask):
        numbers: dict[tuple[str, ...], Any] = {("heads",): task.heads, ("context",): task.context}
    elif isinstance(task, CausalLanguageModelTask):
        heads = task.model.get("num_attention_heads") if isinstance(task.model, dict) else None
        numbers = {("model", "num_attention_heads"): heads, ("context",): task.context}
    else:
        numbers = {}
    for key, count in numbers.items():
        if isinstance(count, int) and count % size:
            message = f"{count} is not divisible by sequence_parallel_size {size}"
            context.conflict((*_TASK, *key), message, "choose another")
    if not numbers and ":" not in task.name:
        message = f'a model of the task "{task.name}" does not support sequence parallelism'
        context.conflict(_SEQUENCE, message, 'remove it, or train "language"')

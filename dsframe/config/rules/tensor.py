"""Rules about tensor parallelism: what can be sharded, and what DeepSpeed then gets wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsframe.config.rules.context import RuleContext
from dsframe.config.rules.model import PER_TENSOR

_SIZE = ("tensor_parallel", "autotp_size")
_TASK = ("dsframe", "task")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_HAND_WRITTEN = 'describe in "partition_config" which layers are sharded, and how'

# What transformers 5 says nothing about, so that DeepSpeed refuses or guesses: the best known of them.
_WITHOUT_A_PLAN = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "bloom", "falcon", "codegen", "mpt", "vit")


def check(context: RuleContext) -> None:
    """Report what is wrong with ``tensor_parallel``."""
    size = context.file.tensor_parallel.autotp_size
    if size < 2 or not context.by_deepspeed or context.findings.fails(("tensor_parallel",)):
        return  # engines of full replicas shard nothing
    _heads(context, size)
    _cuts(context)
    file = context.file
    if file.zero_optimization.stage == 0 and (file.bf16.enabled or file.fp16.enabled):
        width = "bf16" if file.bf16.enabled else "fp16"
        context.conflict(
            _SIZE, f"not possible at stage 0 with {width}: DeepSpeed computes the gradient norm from one rank only",
            'write "zero_optimization": {"stage": 1}',
        )  # fmt: skip
    kind = file.optimizer.type.lower() if file.optimizer else ""
    if kind in PER_TENSOR:
        context.conflict(
            _SIZE, f"{kind.capitalize()} computes each update from the full weight: shards would train differently",
            "choose another optimizer",
        )  # fmt: skip
    if (file.sequence_parallel_size or 1) > 1:
        context.conflict(_SIZE, "DeepSpeed cannot combine tensor and sequence parallelism", "keep one of them")
    if file.tensor_parallel.vocab_parallel_lm_head or file.tensor_parallel.vocab_parallel_ce_backend != "torch":
        key = "vocab_parallel_lm_head" if file.tensor_parallel.vocab_parallel_lm_head else "vocab_parallel_ce_backend"
        context.conflict(
            ("tensor_parallel", key),
            "this needs the loss inside the model, which dsframe's tasks do not have",
            "remove it",
        )
    if file.dsframe.model.tiling is not None:
        context.conflict(
            ("dsframe", "model", "tiling"),
            "not possible with tensor parallelism: AutoTP does not know the tiles' names",
            "remove it",
        )


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
        context.conflict(_SIZE, "nothing says how to shard the stages of a model of transformers", _HAND_WRITTEN)
    elif name == "vision":
        context.conflict(_SIZE, f'nothing says how to shard the model "{getattr(task, "model", "")}"', _HAND_WRITTEN)
    elif kind in _WITHOUT_A_PLAN:
        context.conflict(
            _SIZE, f'neither transformers nor DeepSpeed says how to shard a model of type "{kind}"', _HAND_WRITTEN
        )

"""Rules about tensor parallelism: what can be cut, and what DeepSpeed gets wrong when it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsframe.config.rule import Judge
from dsframe.config.rules_model import PER_TENSOR

_SIZE = ("tensor_parallel", "autotp_size")
_TASK = ("dsframe", "task")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_HAND_WRITTEN = 'say in "partition_config" which layers are cut, and how'

# What transformers 5 says nothing about, so that DeepSpeed refuses or guesses: the best known of them.
_WITHOUT_A_PLAN = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "opt", "bloom", "falcon", "codegen", "mpt", "vit")


def judge(bench: Judge) -> None:
    """Report what is wrong with ``tensor_parallel``."""
    size = bench.file.tensor_parallel.autotp_size
    if size < 2 or not bench.by_deepspeed or bench.findings.fails(("tensor_parallel",)):
        return  # engines of full replicas cut nothing
    _heads(bench, size)
    _cuts(bench)
    file = bench.file
    if file.zero_optimization.stage == 0 and (file.bf16.enabled or file.fp16.enabled):
        width = "bf16" if file.bf16.enabled else "fp16"
        bench.conflict(
            _SIZE, f"at stage 0 with {width} DeepSpeed takes one rank's share of the gradients for all in their norm",
            'write "zero_optimization": {"stage": 1}',
        )  # fmt: skip
    kind = file.optimizer.type.lower() if file.optimizer else ""
    if kind in PER_TENSOR:
        bench.conflict(
            _SIZE, f"{kind.capitalize()} looks at a weight as a whole: the ranks' shares would train differently",
            "choose another optimizer",
        )  # fmt: skip
    if (file.sequence_parallel_size or 1) > 1:
        bench.conflict(
            _SIZE, "not possible with sequence parallelism: DeepSpeed makes groups for one of them", "take one out"
        )
    if file.tensor_parallel.vocab_parallel_lm_head or file.tensor_parallel.vocab_parallel_ce_backend != "torch":
        key = "vocab_parallel_lm_head" if file.tensor_parallel.vocab_parallel_lm_head else "vocab_parallel_ce_backend"
        bench.conflict(
            ("tensor_parallel", key), "needs the loss inside of the model; a task's loss takes all scores", "remove it"
        )
    if file.dsframe.model.tiling is not None:
        bench.conflict(("dsframe", "model", "tiling"), "tiles have no names that AutoTP could cut", "remove it")


def _heads(bench: Judge, size: int) -> None:
    """A share is whole heads."""
    for path, heads in _written_heads(bench):
        if heads % size:
            bench.conflict(path, f"{heads} is not divisible by autotp_size {size}", "choose another")


def _written_heads(bench: Judge) -> list[tuple[tuple[str, ...], int]]:
    task = bench.file.dsframe.task
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
    """The settings of a model of transformers: in the file, or in its folder."""
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


def _cuts(bench: Judge) -> None:
    """Somebody must say how the model is cut. A file without a task may belong to a program with one of its own."""
    if not bench.wrote(*_TASK):
        return
    section, task = bench.file.tensor_parallel, bench.file.dsframe.task
    if section.partition_config is not None or section.preset_model is not None:
        return
    name = getattr(task, "name", "")
    kind = _settings(task).get("model_type")
    if name == "vision":
        bench.conflict(_SIZE, f'nothing says how to cut the model "{getattr(task, "model", "")}"', _HAND_WRITTEN)
    elif kind in _WITHOUT_A_PLAN:
        bench.conflict(
            _SIZE, f'neither transformers nor DeepSpeed says how to cut a model of type "{kind}"', _HAND_WRITTEN
        )

"""Every engine keeps the contract, in real processes, in every number format it takes."""

import re

import pytest

from dsframe.engines import TABLE
from tests.contract import CHECKS, SAMPLES
from tests.engines.references import CONTRACTS
from tests.files import ds_config, write_json
from tests.processes import run_ranks, warm
from tests.text_files import LLAMA

FILE = ds_config(16, "AdamW", 0.01, sections={"gradient_accumulation_steps": 2, "gradient_clipping": 1.0})
ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        **dict.fromkeys(
            ("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"), 0
        ),
    }
}
"""Where each layer's weights are gathered for it alone."""
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
AUTOCAST_FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}}


def language(kind, **settings):
    """A task of transformers' with the contract's number of samples."""
    model = {**LLAMA, "model_type": kind, **settings}
    task = {"name": "causal-language-model", "model": model, "context": 16, "corpus": "synthetic", "samples": SAMPLES}
    return {"dsframe": {"task": task}}


CASES = {
    "zero0": ("deepspeed", 2, {}),
    "zero1 bf16": ("deepspeed", 2, {"zero_optimization": {"stage": 1}, **BF16}),
    "zero2": ("deepspeed", 2, {"zero_optimization": {"stage": 2}}),
    "zero3 autocast": ("deepspeed", 2, {**ZERO3, **AUTOCAST}),
    "zero3 on 3": ("deepspeed", 3, {"train_batch_size": 24, **ZERO3}),
    "pipeline": ("deepspeed", 2, {"pipeline": {"stages": 2}}),
    "pipeline 2x2 zero1 bf16": (
        "deepspeed",
        4,
        {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}, "zero_optimization": {"stage": 1}, **BF16},
    ),
    "tensor zero1": ("deepspeed", 2, {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}),
    "llama, sequences shared, zero2": (
        "deepspeed",
        2,
        {"sequence_parallel_size": 2, "zero_optimization": {"stage": 2}, **language("llama")},
    ),
    "llama in stages": ("deepspeed", 2, {"pipeline": {"stages": 2}, **language("llama", tie_word_embeddings=True)}),
    "mixtral, experts spread, zero1": (
        "deepspeed",
        2,
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "zero_optimization": {"stage": 1},
            **language("mixtral", num_local_experts=4),
        },
    ),
    "horovod": ("horovod", 2, {}),
    "horovod fp16 sgd compressed": (
        "horovod",
        2,
        {**FP16, **SGD, "dsframe": {"horovod": {"compression": "fp16"}}},
    ),
    "ddp": ("ddp", 2, {}),
    "ddp autocast fp16": ("ddp", 2, AUTOCAST_FP16),
    "fsdp": ("fsdp", 2, {}),
    "fsdp fp16, hybrid": (
        "fsdp",
        4,
        {
            **FP16,
            "dsframe": {"fsdp": {"sharding": "hybrid", "shard_size": 2, "wrap": ["Linear"]}},
        },
    ),
    "single": ("single", 1, {}),
    "reference dataparallel": ("reference-dataparallel", 1, {}),
}


@pytest.mark.parametrize("ranks", sorted({ranks for _, ranks, _ in CASES.values()}))
def test_contract(ranks, tmp_path):
    """One job for each number of ranks."""
    cases = [case for case in CASES if CASES[case][1] == ranks]
    words = []
    for number, case in enumerate(cases):
        engine, _, changes = CASES[case]
        words += [str(write_json(tmp_path / f"{number}.json", {**FILE, **changes})), engine]
    said = run_ranks(warm(ranks, ["-m", "tests.contract", *words]), timeout_seconds=400).check().stdout
    assert said.count(f"kept: {len(CHECKS)} rules") == len(cases)
    gathered = re.findall(r"^gathered in an evaluation: (\d+) bytes, (\d+) where", said, re.MULTILINE)
    for case, (kept, anew) in zip(cases, gathered, strict=True):
        assert int(anew) > 4 * int(kept) > 0 if case.startswith(("zero3", "fsdp")) else kept == anew, case


def test_no_engine_is_left_out():
    assert {engine for engine, _, _ in CASES.values()} | {engine for engine, _ in CONTRACTS} == set(TABLE)

"""What test_tensor.py runs on every rank: layers cut among two ranks, beside the same training in one process.

    torchrun --nproc-per-node=N -m tests.engines.tensor REPORT.json CASE...

Each case: six steps of both, their states compared; three more of both; then each goes on from the other's state after step six,
and the cut one once more from its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsframe import engines, optimizers, schedules, tasks
from dsframe import world as worlds
from dsframe.checkpoint.state import Snapshot
from dsframe.config import Facts, load
from dsframe.data import Loader
from dsframe.engine import Engine, Plan
from dsframe.engines.library import groups
from dsframe.process_group import device_of
from dsframe.train import leave_at_once
from tests.engines.several import one_process_group

BF16 = {"bf16": {"enabled": True}}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TASKS: dict[str, dict[str, Any]] = {
    "gpt": {"name": "language", "layers": 2, "heads": 4, "width": 32},
    "llama": {"name": "causal-language-model", "model": LLAMA},
    "tied": {"name": "causal-language-model", "model": {**LLAMA, "tie_word_embeddings": True}},
    "qwen3": {"name": "causal-language-model", "model": {**LLAMA, "model_type": "qwen3", "head_dim": 8}},
}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt zero0": ("gpt", zero(0)),
    "gpt zero2": ("gpt", zero(2)),
    "gpt zero3": ("gpt", zero(3, stage3_param_persistence_threshold=0)),
    "tied llama zero1": ("tied", zero(1)),
    "llama zero3": ("llama", zero(3)),
    "llama zero1 bf16": ("llama", {**zero(1), **BF16}),
    "qwen3 zero1": ("qwen3", zero(1)),
    "llama zero2 cpu": ("llama", zero(2, offload_optimizer={"device": "cpu"})),
}


def build(kind: str, changes: dict[str, Any], engine: str) -> tuple[Engine, Loader]:
    """**Collective** for DeepSpeed. An engine, and its samples."""
    size = 1 if engine == "single" else worlds.here().size
    world = worlds.World() if engine == "single" else worlds.here()
    tensor = {"tensor_parallel": {"autotp_size": 2}}
    ranks = size // 2 or 1
    config = load(
        {
            "train_micro_batch_size_per_gpu": 8 // ranks if engine != "single" else 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
            "dsframe": {
                "engine": engine,
                "task": {**TASKS[kind], "context": 16, "corpus": "synthetic", "samples": 500},
            },
            **changes,
            **({} if engine == "single" else tensor),
        }
    )
    config = config.resolve(Facts(size, 9, replicas=False))
    task, optimizer, batch = tasks.build(config.settings.task, 0), optimizers.read(config), config.batch(size)
    assert batch.train_batch_size == 16
    device = device_of(world)
    loader = Loader(
        task.train_data(),
        seed=0,
        micro_batch_size=batch.micro_batch_size,
        accumulation_steps=2,
        rank=batch.data_rank(world.rank),
        ranks=batch.data_parallel_size,
        device=device,
    )
    plan = Plan(config, world, task, optimizer, schedules.constant(0.01), batch, device)
    return engines.load(engine, config)(plan), loader


def steps(made: tuple[Engine, Loader], first: int, last: int) -> Iterator[tuple[float, float | None]]:
    """The global batch's loss and gradient norm at each step."""
    engine, loader = made
    for step in range(first, last):
        result = engine.train_step(loader.micro_batches(step))
        norm = None if result.gradient_norm is None else float(result.gradient_norm)
        yield float(engine.sum_over_ranks(result.loss.reshape(1).double())) / engine.plan.world.size, norm


def apart(left: Snapshot, right: Snapshot) -> float:
    """The largest difference between two states, whose names, shapes and scalars are the same."""
    assert {name: list(shape) for name, shape in left.shapes.items()} == {n: list(s) for n, s in right.shapes.items()}
    largest = 0.0
    for name in left.shapes:
        a, b = left.parameter(name), right.parameter(name)
        assert a.scalars == b.scalars, (name, a.scalars, b.scalars)
        assert list(a.moments) == list(b.moments), (name, list(a.moments), list(b.moments))
        pairs = [(a.weight, b.weight), *((a.moments[key], b.moments[key]) for key in a.moments)]
        largest = max(largest, *(float((one - other).abs().max()) for one, other in pairs))
    return largest


def measure(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    alone, cut = build(kind, changes, "single"), build(kind, changes, "deepspeed")
    report: dict[str, Any] = {"description": cut[0].description}
    report["before"] = apart(Snapshot(cut[0].state()), Snapshot(alone[0].state()))
    report["alone"], report["cut"] = list(steps(alone, 0, 6)), list(steps(cut, 0, 6))
    kept_alone, kept_cut = Snapshot(alone[0].state()), Snapshot(cut[0].state())
    report["state"] = apart(kept_cut, kept_alone)
    on_alone, on_cut = list(steps(alone, 6, 9)), list(steps(cut, 6, 9))
    report["on"] = on_alone
    cut[0].load_state(kept_alone)
    report["read_back"] = apart(Snapshot(cut[0].state()), kept_alone)
    report["on from the single"] = list(steps(cut, 6, 9))
    alone[0].load_state(kept_cut)
    report["single on from it"] = list(steps(alone, 6, 9))
    cut[0].load_state(kept_cut)
    report["again"] = list(steps(cut, 6, 9)) == on_cut
    held = sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in cut[0]._model.parameters())  # type: ignore[attr-defined]
    report["elements"] = [held, sum(p.numel() for p in alone[0].model.parameters())]  # type: ignore[attr-defined]
    return report


def main(path: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    report = {}
    with one_process_group():
        for case in cases:
            report[case] = measure(*CASES[case])
            groups._release_process_group_references()
        if torch.distributed.get_rank() == 0:
            Path(path).write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(CASES))
    leave_at_once(0)

"""Checkpoints with real processes: every engine's state out and in again, across engines, and through a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import deepspeed, horovodrun, python, run_ranks, torchrun

LAUNCHERS = {"deepspeed": deepspeed, "horovod": horovodrun, "ddp": torchrun}


def command(engine: str, processes: int, arguments: list[str]) -> list[str]:
    return python(arguments) if engine == "single" else LAUNCHERS[engine](processes, arguments)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}

ROUND_TRIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("single", {}),
    "ddp-bf16": ("ddp", BF16),
    "horovod": ("horovod", {}),
    "zero0": ("deepspeed", zero(0)),
    "zero0-bf16": ("deepspeed", {**zero(0), **BF16}),
    "zero1": ("deepspeed", zero(1)),
    "zero1-bf16": ("deepspeed", {**zero(1), **BF16}),
    "zero2-cpu": ("deepspeed", zero(2, offload_optimizer={"device": "cpu"})),
    "zero3": ("deepspeed", zero(3, sub_group_size=200)),
    "zero3-kept": ("deepspeed", {**zero(3, stage3_param_persistence_threshold=0), **BF16}),
    "zero3-cpu": ("deepspeed", zero(3, **CPU)),
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_state_goes_out_and_in_again(case: str, tmp_path: Path) -> None:
    engine, changes = ROUND_TRIPS[case]
    report = round_trip(engine, changes, tmp_path)
    assert report["repeated"] == report["after"]
    assert report["from_the_start"] == report["first"] or case == "zero0-bf16"  # DeepSpeed steps once by itself there
    assert report["read_back"] == 0.0
    assert report["after"] != report["first"]
    assert report["updates"] == 5
    assert report["seen"] == (40 if engine == "single" else 20)
    assert report["dtypes"] == ["torch.float32"]
    assert report["shapes"] == {
        "scale": [3],
        "first.weight": [19, 7],
        "first.bias": [19],
        "middle.weight": [19, 19],
        "middle.bias": [19],
        "last.weight": [3, 19],
        "last.bias": [3],
    }
    moments = {**{name: ["exp_avg", "exp_avg_sq"] for name in report["shapes"] if name != "scale"}, "scale": []}
    assert report["moments"] == moments
    hidden = case == "zero0-bf16"
    assert {one.get("step") for name, one in report["scalars"].items() if name != "scale"} == {5.0 + hidden}


def round_trip(engine: str, changes: dict[str, Any], folder: Path, width: int = 19) -> dict[str, Any]:
    file = folder / "config.json"
    file.write_text(json.dumps(configuration(engine, changes, width)))
    arguments = ["-m", "tests.engines.round_trip", str(file)]
    run_ranks(
        python(arguments) if engine == "single" else torchrun(2, arguments), timeout_seconds=150, cwd=folder
    ).check()
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def configuration(engine: str, changes: dict[str, Any], width: int) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "dsframe": {
            "engine": engine,
            "task": {"name": "tests.engines.odd_task:Odd", "options": {"width": width}},
            "threads_per_rank": 1,
        },
        **changes,
    }

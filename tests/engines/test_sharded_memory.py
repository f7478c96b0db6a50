"""Memory of a rank whose model is sharded: it never holds the model whole, and what a step frees goes back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sharded_memory import llama
from dsframe import tasks
from dsframe.config import load
from dsframe.tools.plan.footprint import Memory
from dsframe.tools.plan.hardware import TABLE
from dsframe.tools.plan.predict import predict
from dsframe.tools.plan.trace import traced
from tests.processes import run_ranks, warm

MILLIONS = 50
OFF = 0.15
"""By how much the plan may miss what is measured, the base included."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_peaks_are_as_planned(engine: str, precision: str, tmp_path: Path) -> None:
    """And far from what a whole model takes: FSDP's share is 2 copies of the fp32 weights, ZeRO-3's 2.5; whole they are 4 and 5."""
    options = ["--engine", engine, "--precision", precision, "--millions", str(MILLIONS)]
    finished = run_ranks(
        warm(2, ["-m", "benchmarks.sharded_memory", *options]), cwd=tmp_path, timeout_seconds=300
    ).check()
    found = re.findall(r"base (\S+) MiB  set-up \+\S+ \((\S+) anonymous\)  steps \+(\S+) ", finished.stdout)
    assert len(found) == 2, finished
    memory = planned(engine, precision)
    for figures in found:
        base, setup, steps = (float(figure.replace(",", "")) * 2**20 for figure in figures)
        assert base + setup == pytest.approx(base + memory.setup - memory.reserved, rel=OFF), finished.stdout
        assert base + steps == pytest.approx(base + memory.total - memory.reserved, rel=OFF), finished.stdout
        assert steps < 3.7 * 4 * MILLIONS * 1e6


def planned(engine: str, precision: str) -> Memory:
    """What ``dsframe plan`` says of the same training."""
    task = {"name": "causal-language-model", "model": llama(MILLIONS), "context": 32, "corpus": "synthetic"}
    file: dict[str, Any] = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "dsframe": {"engine": engine, "task": task},
        **({"zero_optimization": {"stage": 3}} if engine == "deepspeed" else {}),
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }
    config = load(file)
    model = traced(config, tasks.build(config.settings.task, 0))
    return predict(config, engine, model, TABLE["cpu"], 2).memory

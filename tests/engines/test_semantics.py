"""Keys that could mean different things on different engines, and do not: real runs, compared step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsframe.report.compare import losses
from tests.processes import horovodrun, run_ranks, warm

STEPS = 12
BASE: dict[str, Any] = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
    "dsframe": {
        "task": {
            "name": "language",
            "layers": 2,
            "heads": 2,
            "width": 32,
            "context": 32,
            "corpus": "synthetic",
            "samples": 256,
        },
        "steps": STEPS,
        "eval_micro_batch_size": 200,
        "log_every_steps": 1,
        "seed": 3,
    },
}
# No gradient_clipping anywhere: DeepSpeed's default of 1.0 must hold on every engine. The learning rates make it bite.
FILES: dict[str, dict[str, Any]] = {
    "sgd, torch schedule, predivided": {
        "optimizer": {"type": "SGD", "params": {"lr": 2.0, "momentum": 0.9}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 4, "gamma": 0.5}},
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
        "zero_allow_untested_optimizer": True,
    },
    "sum, cycled momentum": {
        "gradient_allreduce_op": "sum",
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3, "cycle_first_step_size": 5},
        },
    },
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
BOUNDS = {"bf16": 5e-3, "autocast": 5e-3}
ENGINES: dict[str, dict[str, Any]] = {
    "zero0": {"zero_optimization": {"stage": 0}},
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "horovod": {"dsframe": {"engine": "horovod"}},
    "ddp": {"dsframe": {"engine": "ddp"}},
}


def curve(directory: Path, name: str, engine: str) -> list[float]:
    changes = ENGINES[engine]
    document = {**BASE, **FILES[name], **changes, "dsframe": {**BASE["dsframe"], **changes.get("dsframe", {})}}
    (directory / "file.json").write_text(json.dumps(document))
    run_ranks(
        warm(2, ["-m", "dsframe.train", "--config", "file.json", "--run-dir", engine]),
        cwd=directory,
        timeout_seconds=200,
    ).check()
    return [loss for _, loss in sorted(losses(directory / engine).items())]


@pytest.mark.parametrize("name", FILES)
def test_one_meaning(name: str, tmp_path: Path) -> None:
    chosen = ["ddp", "horovod", "zero1"] if name not in BOUNDS else ["ddp", "horovod", "zero2"]
    if name == "bf16":
        chosen.append("zero0")
    curves = {engine: curve(tmp_path, name, engine) for engine in chosen}
    for engine in chosen[1:]:
        assert curves[engine] == pytest.approx(curves["ddp"], abs=BOUNDS.get(name, 2e-5)), engine
    assert min(curves["ddp"]) < curves["ddp"][0] - 0.01, "it moves"


def test_adasum(tmp_path: Path) -> None:
    """Where Horovod was built with MPI it trains; elsewhere it is refused before anything is trained."""
    import horovod.torch as hvd

    options = ["--engine", "horovod", "--set", "dsframe.horovod.op=adasum", "--set", "gradient_clipping=0"]
    (tmp_path / "file.json").write_text(json.dumps(BASE))
    command = horovodrun(2, ["-m", "dsframe.train", "--config", "file.json", "--run-dir", "run", *options])
    finished = run_ranks(command, cwd=tmp_path, timeout_seconds=120)
    if hvd.mpi_built():
        finished.check()
        assert len(losses(tmp_path / "run")) == STEPS
    else:
        assert finished.returncode != 0
        assert 'horovod.op "adasum" needs a Horovod with MPI' in finished.stderr
        assert "[rank" not in finished.stderr

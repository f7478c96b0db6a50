"""Losses that are no number: every engine stops with the culprit's name, or leaves out the same updates."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import dsframe
from dsframe.data.sampler import Sampler
from dsframe.errors import CheckpointError, TrainingError
from dsframe.report.record import read_metrics, read_summary
from tests.engines.nan_task import BROKEN, OneBrokenSample
from tests.processes import Finished, python, run_ranks, torchrun

STEPS = 20


def configuration(folder: Path, engine: str = "single", stage: int = 0, **settings: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "dsframe": {
            "engine": engine,
            "steps": STEPS,
            "threads_per_rank": 1,
            "run_dir": str(folder / f"{engine}-{stage}"),
            "log_every_steps": 1,
            **settings,
        },
    }


def broken_step() -> int:
    """The first step, from 1, that meets the broken sample."""
    sampler = Sampler(64, 8, seed=0)
    return next(step + 1 for step in range(8) if any(BROKEN in rows for _, rows in sampler.global_batch(step)))


def losses(folder: Path) -> dict[int, float]:
    return {one["step"]: one["loss"] for one in read_metrics(folder) if "loss" in one}


def train(folder: Path, config: dict[str, Any], processes: int = 1) -> Finished:
    """A run of its own: DeepSpeed is set up once in the life of a process."""
    config["dsframe"]["task"] = {"name": "tests.engines.nan_task:OneBrokenSample"}
    (folder / "config.json").write_text(json.dumps(config))
    command = ["-m", "dsframe.train", "--config", "config.json"]
    started = torchrun(processes, command) if processes > 1 else python(command)
    return run_ranks(started, cwd=folder, timeout_seconds=100)


def test_every_engine_leaves_out_the_same_updates(tmp_path: Path) -> None:
    """One process each: what two differ by is the other tests' matter."""
    curves = {}
    for engine, stage in (("single", 0), ("deepspeed", 0), ("deepspeed", 3), ("fsdp", 0)):
        train(tmp_path, configuration(tmp_path, engine, stage, on_nonfinite="skip")).check()
        curves[engine, stage] = losses(tmp_path / f"{engine}-{stage}")
        assert read_summary(tmp_path / f"{engine}-{stage}")["skipped_steps"] == 3, (engine, stage)
    first = curves["single", 0]
    missing = [step for step, loss in first.items() if loss is None]
    assert missing[0] == broken_step()
    assert len(missing) == 3
    for case, curve in curves.items():
        assert [step for step, loss in curve.items() if loss is None] == missing, case
        assert max(abs(curve[step] - first[step]) for step in first if step not in missing) < 1e-5, case


@pytest.mark.parametrize(("engine", "stage"), [("single", 0), ("deepspeed", 2)])
def test_without_skipping_every_engine_stops(engine: str, stage: int, tmp_path: Path) -> None:
    stopped = train(tmp_path, configuration(tmp_path, engine, stage))
    assert stopped.returncode == TrainingError.exit_code
    text = stopped.stderr
    assert f"the loss of rank 0 is not finite since step {broken_step()}, made of samples " in text
    assert f"of these, {BROKEN} hold NaN or infinity themselves" in text
    after = {
        "deepspeed": "every parameter is finite",
        "single": "4 of 4 parameters are not finite by now, the first is 0.",
    }
    assert after[engine] in text  # DeepSpeed leaves such updates out by itself


def test_the_rank_is_named_however_late_it_is_seen_and_nothing_broken_is_saved(tmp_path: Path) -> None:
    """On two ranks, logged long after and with a checkpoint due in between."""
    late = {"log_every_steps": 1000, "checkpoints": {"every_steps": 1}}
    config = configuration(tmp_path, "ddp", 0, **late)
    failed = train(tmp_path, config, processes=2)
    assert failed.returncode != 0
    step = broken_step()
    rank = next(
        rank
        for rank in (0, 1)
        for _, rows in Sampler(64, 8, seed=0).micro_batch(step - 1, 0, rank, 2, 4)
        if BROKEN in rows
    )
    assert re.search(rf"step {step}: the loss of rank {rank} is not finite since step {step}", failed.stderr), str(
        failed
    )
    assert f"of these, {BROKEN} hold NaN" in failed.stderr
    saved = sorted((tmp_path / "ddp-0" / "checkpoints").glob("step-*"))
    assert [path.name for path in saved] == [f"step-{number:08}" for number in (step - 2, step - 1)]  # keep_last is 2


def test_updates_left_out_for_ever_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneBrokenSample, "loss", lambda self, outputs, targets: outputs.sum() * math.nan)
    monkeypatch.setattr("dsframe.trainer.SKIPS_IN_A_ROW", 3)
    with pytest.raises(TrainingError, match=r"not finite since step 1, .*; every parameter is finite"):
        dsframe.fit(OneBrokenSample(), configuration(tmp_path, on_nonfinite="skip"))
    with pytest.raises(CheckpointError):
        dsframe.fit(OneBrokenSample(), configuration(tmp_path), resume=str(tmp_path / "single-0"))

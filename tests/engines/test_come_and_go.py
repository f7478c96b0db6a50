"""Checkpoints of DeepSpeed's own come in: training goes on with DeepSpeed's own losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsframe.checkpoint import store
from dsframe.cli import main as dsframe
from dsframe.errors import CheckpointError
from tests.engines.plain_deepspeed import GROUPS, SAVED, STEPS
from tests.files import ds_config, read_json, write_json
from tests.portability import losses
from tests.processes import REPOSITORY, run_ranks, warm

SCRIPT = str(REPOSITORY / "tests" / "engines" / "plain_deepspeed.py")


def configuration(stage: int, *, frozen: bool = True, groups: bool = False, **more: Any) -> dict[str, Any]:
    return ds_config(
        8,
        {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
        sections={
            "steps_per_print": 1_000_000,
            "zero_optimization": {"stage": stage, **({"sub_group_size": 200} if stage == 3 else {})},
            **more,
        },
        **{
            "steps": STEPS,
            "log_every_steps": 1,
            "threads_per_rank": 1,
            "task": {"name": "tests.engines.plain_deepspeed:Plain", "options": {"frozen": frozen}},
            **({"parameter_groups": GROUPS} if groups else {}),
        },
    )


def plain(folder: Path) -> list[float]:
    """The losses of the plain script's steps after the checkpoint."""
    run_ranks(warm(2, [SCRIPT, "config.json", "theirs"]), cwd=folder, timeout_seconds=120).check()
    found: list[float] = read_json(folder / "losses.json")
    return found


def resumed(folder: Path) -> list[float]:
    """Goes on in one process without DeepSpeed; the losses."""
    command = ["-m", "dsframe.train", "--config", "config.json", "--engine", "single", "--run-dir", "run"]
    run_ranks(warm(1, [*command, "--resume", "auto"]), cwd=folder, timeout_seconds=100).check()
    curve = losses(folder / "run")
    assert list(curve) == list(range(SAVED + 1, STEPS + 1))
    return list(curve.values())


@pytest.mark.parametrize(
    ("stage", "more", "tolerance"),
    [
        pytest.param(0, {}, 1e-6, marks=pytest.mark.long),
        (2, {}, 1e-6),
        (3, {}, 1e-6),
        (0, {"bf16": {"enabled": True}}, 5e-3),
        (2, {"groups": True}, 1e-6),
        (3, {"groups": True}, 1e-6),
    ],
    ids=["zero0", "zero2", "zero3", "zero0-bf16", "zero2-groups", "zero3-groups"],
)
def test_a_deepspeed_run_goes_on_in_dsframe(
    stage: int, more: dict[str, Any], tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "config.json", configuration(stage, **more))
    expected = plain(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["import", "theirs", "--config", "config.json", "--run-dir", "run"]
    assert dsframe(command) == CheckpointError.exit_code  # pickled
    assert not (tmp_path / "run").exists()
    assert dsframe([*command, "--trust"]) == 0
    (path,) = store.Store(tmp_path / "run" / "checkpoints").newest_first()
    assert store.verify(path) == []
    assert max(abs(a - b) for a, b in zip(resumed(tmp_path), expected, strict=True)) < tolerance

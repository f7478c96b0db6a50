"""What a finished run was predicted to take is read off its directory, after the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsframe import run
from dsframe.cli import main
from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.run_dir.record import read_summary
from dsframe.tools.plan import report_prediction
from dsframe.tools.report.runs import read_run
from tests.engines.odd_task import Odd

TASK = {"name": "language", "layers": 1, "width": 32, "heads": 2, "context": 8, "corpus": "synthetic", "samples": 8}


def file(folder: Path, **more: Any) -> dict[str, Any]:
    section = {"engine": "single", "steps": 2, "run_dir": str(folder / "run"), **more}
    return {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "dsframe": section}


def test_the_directory_of_a_run_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    run.execute(load(file(tmp_path, task=TASK, mfu=True)), world=World())
    said = capsys.readouterr().err
    assert f"  next        dsframe report {directory}" in said.splitlines()
    assert "predicted" not in said
    assert "MFU is relative to" in said
    assert sorted(path.name for path in directory.iterdir()) == [
        ".lock", "checkpoints", "config.json", "metrics.jsonl", "run.json", "summary.json",
    ]  # fmt: skip
    summary = read_summary(directory)
    assert (summary["script_task"], summary["training_processes"]) == (None, 1)
    assert summary["mfu"] is None or 0 < summary["mfu"] < 1
    guess = report_prediction.predicted(directory, summary)
    assert guess["memory_bytes"] > summary["base_bytes"] > 2**20
    assert main(["report", str(directory)]) == 0
    prediction, page = capsys.readouterr().out.splitlines()
    assert prediction.startswith("run: predicted: ")
    assert prediction.endswith("measured)")
    assert page == str(directory / "report.html")


def test_what_cannot_be_predicted_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    run.execute(load(file(tmp_path)), task=Odd(), world=World(), quiet=True)
    assert main(["report", str(directory)]) == 0
    said, _ = capsys.readouterr().out.splitlines()
    assert (
        said
        == "run: no prediction: the task tests.engines.odd_task:Odd is a script's own, which this command cannot build"
    )
    summary = read_summary(directory)
    for changes, problem in (
        ({"script_task": None}, ""),
        ({"script_task": None, "engine": "gone"}, "KeyError: 'gone'"),
    ):
        (directory / "summary.json").write_text(json.dumps(summary | changes))
        assert read_run(directory).predicted.get("problem", "").startswith(problem)

"""``dsframe tune``: a search that is killed and started again has the trials of an undisturbed one, and leaves no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsframe.cli import main
from dsframe.errors import TaskError, TrainingError
from dsframe.tools import subprocess_runs
from dsframe.tools.tune import Dimension, dimension
from tests.processes import environment

pytest.importorskip("optuna")

FILE: dict[str, Any] = {
    "train_batch_size": 16,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "dsframe": {
        "engine": "single",
        "steps": 12,
        "eval_every_steps": 4,
        "eval_samples": 100,
        "task": {"dataset": "synthetic"},
        "checkpoints": {"every_steps": 4},
    },
}
SEARCH = ["--space", "optimizer.params.lr=1e-4..1:log", "--metric", "loss:min", "--startup", "1", "--seed", "3"]


def command(folder: Path, out: str, *more: str) -> list[str]:
    (folder / "file.json").write_text(json.dumps(FILE))
    return ["tune", "--config", str(folder / "file.json"), *SEARCH, "--out", str(folder / out), *more]


def start(words: Sequence[str], mark: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "dsframe", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(program, stdout=pipe, stderr=pipe, text=True, env=environment(mark), start_new_session=True)


def trainings(folder: Path) -> list[psutil.Process]:
    """Processes that belong to a search in ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_killed_and_started_again(tmp_path: Path) -> None:
    words = command(tmp_path, "killed", "--trials", "3", "--no-prune", "--format", "json")
    search = start(words, "tune")
    log = tmp_path / "killed" / "trial-0001" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (log.exists() and '"evaluation"' in log.read_text()) and time.monotonic() < until:
        assert search.poll() is None, search.communicate()
        time.sleep(0.02)
    os.kill(search.pid, signal.SIGKILL)
    search.communicate()
    while trainings(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert not trainings(tmp_path), "a training outlives its search"
    again = start(words, "tune")
    whole = start(command(tmp_path, "whole", "--trials", "3", "--no-prune", "--format", "json"), "tune")
    results = [one.communicate(timeout=240) for one in (again, whole)]
    assert [again.returncode, whole.returncode] == [0, 0], results
    found, expected = (json.loads(output) for output, _ in results)
    assert found == expected
    assert [one["trial"] for one in found["trials"]] == [0, 1, 2]
    assert "trial 0:" not in results[0][1]  # it was through
    assert main([*words[:-2], "--format", "json"]) == 0  # nothing is left to do
    with pytest.raises(SystemExit):
        main(["tune", "--config", str(tmp_path / "file.json"), "--space", "a", "--metric", "loss:min"])
    assert main([*words, "--seed", "4"]) != 0  # the folder holds another search


def test_pruned_ended_and_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two values of which one learns nothing: after five trials it is pruned. What the file cannot have is said first."""
    words = command(tmp_path, "out", "--trials", "2")
    words[words.index("optimizer.params.lr=1e-4..1:log")] = "optimizer.params.lr=0.1,1e-9"
    assert main([*words, "--metric", "f1:min"]) != 0
    assert "the evaluation has no 'f1'; choose from accuracy, loss" in capfd.readouterr().err
    assert not trainings(tmp_path / "out")
    words[words.index("optimizer.params.lr=0.1,1e-9")] = "optimizer.params.lr=0.1,x"
    assert main(words) != 0
    assert "must be a number" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1e-5..1e-2:log", Dimension("a.b", 1e-5, 1e-2, "log")),
        ("a=1..8:int", Dimension("a", 1, 8, "int")),
        ("a=0..1", Dimension("a", 0, 1)),
        ("a=x,y,x", Dimension("a", choices=("x", "y"))),
        ("a=2..1", "smaller"),
        ("a=0..1:log", "above 0"),
        ("a=0.5..2:int", "whole"),
        ("a=x..y", "numbers"),
        ("a=1", "several values"),
        ("a", "write KEY="),
    ],
)
def test_dimensions(text: str, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            dimension(text)
    else:
        assert dimension(text) == expected


def test_the_largest_micro_batch_that_fits_is_found_by_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {
        "name": "language",
        "layers": 1,
        "heads": 2,
        "width": 64,
        "context": 512,
        "corpus": "synthetic",
        "samples": 90,
    }
    file = {**FILE, "train_batch_size": 6, "dsframe": {"engine": "single", "task": task}}
    (tmp_path / "file.json").write_text(json.dumps(file))
    words = ["tune", "--batch", "--config", str(tmp_path / "file.json"), "--out", str(tmp_path / "out")]
    assert main([*words, "--format", "json"]) == 0
    tried = json.loads(capsys.readouterr().out)
    assert [(one["micro_batch"], one["accumulation"]) for one in tried] == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert all(one["fits"] and one["rate"] > 0 for one in tried)
    assert tried[0]["peak_bytes"] < tried[-1]["peak_bytes"]

    train, seen = subprocess_runs.train, []

    def small(file: Any, processes: int, directory: Path, *, overrides: Sequence[str]) -> None:
        seen.append(directory.name)
        if "train_micro_batch_size_per_gpu=3" in overrides:
            raise TrainingError("failed with exit code 1; log ends with torch.OutOfMemoryError: CUDA out of memory")
        if len(seen) == 1:
            train(file, processes, directory, overrides=overrides)

    monkeypatch.setattr(subprocess_runs, "train", small)
    assert main(words) == 0
    assert seen == ["micro-batch-1", "micro-batch-2", "micro-batch-3"]
    printed = capsys.readouterr().out
    assert 'write "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3' in printed
    assert main([*words, "--memory", "10MB"]) == 1
    assert "no micro-batch fits: shard or offload more" in capsys.readouterr().out
    assert main([*words, "--memory", "much"]) == TaskError.exit_code

"""``dsframe tune``: a search that is killed continues where it was, and leaves no process."""

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
SEARCH = ["--space", "optimizer.params.lr=1e-4..1:log", "--metric", "loss:min", "--seed", "3"]


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
    words = command(tmp_path, "killed", "--trials", "2", "--format", "json")
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
    out, said = again.communicate(timeout=240)
    assert again.returncode == 0, said
    trials = json.loads(out)["trials"]
    assert [trial["trial"] for trial in trials] == [0, 2], "the second one was cut off, and tried again"
    assert f"trial 2: optimizer.params.lr {trials[1]['optimizer.params.lr']!r}" in said
    assert "trial 0:" not in said, "it was through"
    assert main(words) == 0, "nothing is left to do"
    assert main([*words, "-np", "2"]) != 0, "the folder holds another search"


def test_ended_and_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What the file cannot have is said first."""
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

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
from dsframe.tools.tune import distribution
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


def test_killed_and_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = command(tmp_path, "killed", "--trials", "2")
    search = start(words, "tune")
    log = tmp_path / "killed" / "trial-0001" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not log.exists() and time.monotonic() < until:
        assert search.poll() is None, search.communicate()
        time.sleep(0.02)
    os.kill(search.pid, signal.SIGKILL)
    search.communicate()
    while trainings(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert not trainings(tmp_path), "a training outlives its search"
    assert main(words) == 0
    printed = capfd.readouterr()
    assert "trial 2: optimizer.params.lr=" in printed.err, "the second one was cut off, and tried again"
    assert "trial 0:" not in printed.err, "it was through"
    assert [line.split()[1] for line in printed.out.splitlines()[1:4]] == ["complete", "fail", "complete"]
    assert main(words) == 0, "nothing is left to do"
    assert "trial" not in capfd.readouterr().err
    assert main([*words, "-np", "2"]) != 0, "the folder holds another search"


def test_what_the_file_cannot_have_is_said_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = command(tmp_path, "out", "--trials", "1")
    words[words.index("optimizer.params.lr=1e-4..1:log")] = "optimizer.params.lr=0.1,1e-9"
    assert main([*words, "--metric", "f1:min"]) != 0
    assert "the evaluation has no 'f1'; choose from accuracy, loss" in capfd.readouterr().err
    words[words.index("optimizer.params.lr=0.1,1e-9")] = "optimizer.params.lr=0.1,x"
    assert main(words) != 0
    assert "must be a number" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("a.b=1e-5..1e-2:log", "FloatDistribution", {"low": 1e-5, "high": 1e-2, "log": True}),
        ("a.b=1..8:int", "IntDistribution", {"low": 1, "high": 8, "log": False}),
        ("a.b=0..1", "FloatDistribution", {"low": 0, "high": 1, "log": False}),
        ("a.b=x,y,x", "CategoricalDistribution", {"choices": ("x", "y")}),
    ],
)
def test_distributions(text: str, kind: str, values: dict[str, Any]) -> None:
    key, made = distribution(text)
    assert (key, type(made).__name__) == ("a.b", kind)
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize("text", ["a=2..1", "a=0..1:log", "a=x..y", "a=1"])
def test_what_is_no_distribution(text: str) -> None:
    with pytest.raises(ValueError, match="a="):
        distribution(text)

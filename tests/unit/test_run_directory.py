"""A run's directory: one place from the start to the end, whatever a task or somebody else does to it."""

import os
import time
from pathlib import Path

import pytest

import dsframe
from dsframe.cluster.world import World
from dsframe.errors import CheckpointError
from dsframe.run_dir.lock import RunLock
from tests.files import ds_config
from tests.lines import Line


class Wanders(Line):
    """Does something at the third loss."""

    rows = 16

    def __init__(self, does):
        self.does, self.calls = does, 0

    def loss(self, outputs, targets):
        self.calls += not self.context.evaluating  # as in the looks at the loss
        if self.calls == 3 and not self.context.evaluating:
            self.does()
        return super().loss(outputs, targets)


def train(does, run_dir="run"):
    settings = {"engine": "single", "steps": 4, "run_dir": run_dir, "checkpoints": {"every_steps": 2}}
    file = ds_config(4, "SGD", 0.1, **settings)
    saved = Path(run_dir).absolute() / "checkpoints" / "latest"

    def later():
        while not saved.exists():  # a save is committed while training goes on; this is its last file
            time.sleep(0.01)
        does()

    dsframe.fit(Wanders(later), file)


def steps(run):
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def test_a_task_that_changes_the_folder(here, capsys):
    (here / "elsewhere").mkdir()
    train(lambda: os.chdir("elsewhere"))
    assert steps(here / "run") == ["step-00000002", "step-00000004"]
    assert not list((here / "elsewhere").iterdir())
    assert "results     run\n" in capsys.readouterr().err  # as the file says, not the absolute path


def test_a_directory_that_was_moved(tmp_path, capsys):
    run = tmp_path / "run"
    train(lambda: run.rename(tmp_path / "moved"), str(run))
    assert (steps(tmp_path / "moved"), steps(run)) == (["step-00000002"], ["step-00000004"])
    assert f"warning: {run} was moved, deleted or replaced" in capsys.readouterr().err


def test_another_run_in_its_place(tmp_path, monkeypatch):
    """A process of another run holds the new directory: nothing is written there."""
    monkeypatch.setattr("dsframe.run_dir.lock.PATIENCE_SECONDS", 0.0)
    run, children = tmp_path / "run", []

    def replaced():
        run.rename(tmp_path / "moved")
        ready, told = os.pipe()
        if not (child := os.fork()):
            RunLock().take(run, World(), print)
            os.write(told, b"1")
            os.read(os.pipe()[0], 1)  # until it is killed
        children.append(child)
        os.read(ready, 1)

    try:
        with pytest.raises(CheckpointError, match="is not this run's any more"):
            train(replaced, str(run))
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
    assert steps(run) == []

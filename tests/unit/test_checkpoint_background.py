"""The saver, at once and in the background: it saves the state of that step, and a crash anywhere leaves the one before."""

import os
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch

from dsframe.checkpoint import store
from dsframe.checkpoint.reader import Checkpoint
from dsframe.checkpoint.saver import Saver
from dsframe.checkpoint.store import Retention, Store
from dsframe.checkpoint.writer import Writer
from dsframe.errors import CheckpointError
from dsframe.model.state import EngineState, ParameterState
from tests.processes import run_program
from tests.threads import Room

SIZES = {"a": (300,), "b": (200, 2), "c": (7,)}


class Training:
    """An engine whose weights are all the number of the step, in place."""

    def __init__(self, ranks):
        self.plan, self.sum_over_ranks = ranks.plan, ranks.sum_over_ranks
        self.plan.world.is_main = self.plan.world.rank == 0
        self.plan.schedule = lambda updates: SimpleNamespace(learning_rate=float(updates))
        self.plan.followers = {}
        self.weights = {name: torch.zeros(size) for name, size in SIZES.items()}
        self.moment = torch.zeros(())
        self.step = 0

    def train(self):
        self.step += 1
        for weight in (*self.weights.values(), self.moment):
            weight.fill_(self.step)

    def buffers(self):
        return {"seen": self.moment}

    def state(self):
        states = (ParameterState(k, w, {"m": self.moment.expand_as(w)}, {"step": 1.0}) for k, w in self.weights.items())
        return EngineState(self.step - 1, None, self.buffers(), {}, states)  # one update was skipped


def save_step(training, saving):
    training.train()
    saving.save(training.step, loss=0.5, evaluation={})


def saver(training, folder, asynchronous, said=None):
    return Saver(
        training,
        Store(folder),
        {"training": {}},
        every_steps=1,
        at_end=True,
        retention=Retention(last=2),
        asynchronous=asynchronous,
        say=(said if said is not None else []).append,
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_holds_the_step_it_was_taken_after(tmp_path, asynchronous, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(Writer, "flush", _after(Writer.flush, go if asynchronous else None))
    said = []

    def run(ranks):
        training = Training(ranks)
        saving = saver(training, tmp_path, asynchronous, said if ranks.plan.world.rank == 0 else None)
        saving._built = {"seen": torch.Size([1] * ranks.plan.world.rank)}
        for _ in range(3):
            save_step(training, saving)
            training.weights["a"].fill_(-1.0)  # training goes on while it is written
            go.set()
        main = ranks.plan.world.is_main
        saving.rate(3, {"loss": 0.5})
        assert (3 in saving._ratings) == main, "when it is written"
        saving.settle()
        assert [saving.due(step, 4) for step in (3, 4)] == [False, True]
        saving._every = None
        assert [saving.due(step, 5) for step in (4, 5)] == [False, True]
        saving._at_end = False
        assert not saving.due(5, 5)

    opened = psutil.Process().num_fds()
    Room(2).run(run)
    assert psutil.Process().num_fds() == opened
    assert [path.name for path in Store(tmp_path).newest_first()] == ["step-00000003", "step-00000002"]
    assert store.read_manifest(Store(tmp_path).path(3))["evaluation"] == {"loss": 0.5}
    for path in Store(tmp_path).newest_first():
        assert store.verify(path) == []
        checkpoint = Checkpoint(path)
        for name in SIZES:
            one = checkpoint.parameter(name)
            assert torch.equal(one.weight, torch.full(SIZES[name], float(checkpoint.step)))
            assert torch.equal(one.moments["m"], one.weight)
        assert float(checkpoint.buffers()["seen"]) == checkpoint.step == checkpoint.manifest["learning_rate"] + 1
        assert checkpoint.resized == {"seen"}, "on rank 1"
        checkpoint.close()
        assert not [*path.glob(".*"), *path.glob("*.index.json")], "there is one file of weights"
    stalls = [line for line in said if "training stood still" in line]
    assert len(stalls) == (3 if asynchronous else 0)
    assert sum(line.startswith("saved ") for line in said) == 3


def _after(action, event):
    def wait_first(*arguments, **keywords):
        assert event is None or event.wait(10)
        return action(*arguments, **keywords)

    return wait_first


def test_an_evaluation_that_cannot_be_added_is_said_and_training_goes_on(tmp_path, monkeypatch):
    said = []
    saving = saver(Room(1).run(Training)[0], tmp_path, asynchronous=False, said=said)
    save_step(saving._engine, saving)
    saving.settle()
    saving.rate(1, {"loss": 0.5})
    assert store.read_manifest(Store(tmp_path).path(1))["evaluation"] == {"loss": 0.5}
    assert len(said) == 1
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    saving.rate(1, {"loss": 0.25})
    assert store.read_manifest(Store(tmp_path).path(1))["evaluation"] == {"loss": 0.5}
    assert "the evaluation after step 1 cannot be added to its checkpoint: " in said[1]
    saving._retention = Retention(best="loss:min")
    for number in (float("inf"), float("nan")):
        saving._look_for_metric({"loss": number})
    assert said[2:] == ["warning: keep_best: loss is infinite here, so this checkpoint cannot be the best"]


def test_what_fails_after_the_tensors_is_told(tmp_path, monkeypatch):
    saving = saver(Room(1).run(Training)[0], tmp_path, asynchronous=True)
    saving._make_model_files = lambda *_: 1 / 0
    save_step(saving._engine, saving)
    saving._writing[1].finish()
    assert saving.failed
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        saving.settle()
    monkeypatch.setattr(Store, "prune", lambda *_: Path("gone").rmdir())
    assert saving._prune().startswith("; an old checkpoint cannot be removed: "), "and nothing ends"


@pytest.mark.parametrize(("step", "failed", "waits"), [(1, False, False), (9, True, False), (9, False, True)])
def test_a_rank_that_ends_waits_briefly_for_a_save(step, failed, waits, tmp_path, monkeypatch):
    monkeypatch.setattr("dsframe.checkpoint.saver._LAST_SECONDS", 0.3)
    saving = saver(Room(1).run(Training)[0], tmp_path, asynchronous=True)
    Store(tmp_path).path(1).mkdir()
    saving._writing = step, SimpleNamespace(failed=failed)
    began = time.monotonic()
    saving.wait_briefly()
    assert (time.monotonic() - began > 0.2) == waits


def test_no_word_is_waited_for_of_a_rank_that_has_failed(tmp_path):
    """It may have none: its disk is full, or away."""
    saving, writing = saver(Room(1).run(Training)[0], tmp_path, asynchronous=True), MagicMock(failure="full")
    saving._writing = 1, writing
    with pytest.raises(CheckpointError, match="full"):
        saving.settle()
    writing.finish.assert_called_once_with(other_rank_failed=True)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_thread_cannot_write_all_ranks_hear_of(tmp_path, failing, monkeypatch):
    flush, full = Writer.flush, threading.Event()

    def fails(writer, sign_of_life):
        if full.is_set() and writer._rank == failing:
            raise OSError(28, "No space left on device", "model.safetensors")
        flush(writer, sign_of_life)

    monkeypatch.setattr(Writer, "flush", fails)

    def run(ranks):
        training = Training(ranks)
        saving = saver(training, tmp_path, asynchronous=True)
        save_step(training, saving)
        saving.settle()
        full.set()
        save_step(training, saving)  # returns: training goes on
        if ranks.plan.world.rank == failing:
            saving._writing[1].wait()
            assert saving.failed
        training.train()
        with pytest.raises(CheckpointError) as raised:
            saving.save(3, loss=None, evaluation={})
        assert not saving.failed
        return str(raised.value)

    words = Room(2).run(run)
    assert len(set(words)) == 1
    assert f"the checkpoint of step 2 cannot be written: rank {failing}: " in words[0]
    assert "No space left on device; the last good one is " in words[0]
    assert [path.name for path in tmp_path.iterdir() if path.name != "latest"] == ["step-00000001"]
    assert store.verify(Store(tmp_path).path(1)) == []


@pytest.mark.parametrize("fault", ["disk", "no room for a word", "bug"])
def test_a_run_that_fails_while_another_ranks_files_cannot_be_written_ends(tmp_path, fault, monkeypatch):
    """No rank tells another then: close() is not collective. Rank 0's thread waits for the other's word."""
    flush, write_text = Writer.flush, Path.write_text

    def fails(writer, sign_of_life):
        if writer._rank == 1:
            raise ValueError("not of the disk") if fault == "bug" else OSError(28, "No space left on device")
        flush(writer, sign_of_life)

    def full(path, *words, **keywords):
        if fault == "no room for a word" and path.name == ".rank-00001.partial":
            raise OSError(28, "No space left on device", str(path))
        return write_text(path, *words, **keywords)

    monkeypatch.setattr(Writer, "flush", fails)
    monkeypatch.setattr(Path, "write_text", full)

    def run(ranks):
        training = Training(ranks)
        saving = saver(training, tmp_path, asynchronous=True)
        save_step(training, saving)
        closing = threading.Thread(target=saving.close, daemon=True)
        closing.start()
        closing.join(10)
        return not closing.is_alive()

    assert Room(2).run(run) == [True, True]
    assert Store(tmp_path).newest_first() == []


def test_a_directory_that_is_away_hides_no_reason(tmp_path, monkeypatch):
    """Nobody can look there for the checkpoint before, either."""

    def stale(*arguments):
        raise OSError(116, "Stale file handle", str(tmp_path))

    training = Training(Room(1).run(lambda ranks: ranks)[0])
    saving = saver(training, tmp_path, False)
    monkeypatch.setattr(Store, "begin", stale)
    monkeypatch.setattr(Store, "newest_first", stale)
    with pytest.raises(CheckpointError) as raised:
        saving.save(1, loss=None, evaluation={})
    assert str(raised.value) == (
        f"the checkpoint of step 1 cannot be written: rank 0: {tmp_path}: Stale file handle; the folder with earlier ones "
        "cannot be read: Stale file handle"
    )


def _one(folder, steps, asynchronous=False):
    """``steps`` checkpoints of one rank."""
    plan = SimpleNamespace(world=SimpleNamespace(rank=0, size=1, local_size=1), device=torch.device("cpu"))
    training = Training(SimpleNamespace(plan=plan, sum_over_ranks=lambda values: values))
    saving = saver(training, folder, asynchronous)
    for _ in range(steps):
        save_step(training, saving)
    saving.settle()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = run_program(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_one_before(small_disk, asynchronous):
    folder = small_disk / "checkpoints"
    _one(folder, 1, asynchronous)
    room = os.statvfs(small_disk)
    (small_disk / "large").write_bytes(bytes(room.f_bavail * room.f_frsize - 8192))

    def again(ranks):
        training = Training(ranks)
        training.step = 1
        training.train()
        saving = saver(training, folder, asynchronous)

        def save():
            saving.save(2, loss=None, evaluation={})
            saving.settle()

        with pytest.raises(CheckpointError) as raised:
            save()
        return str(raised.value)

    for words in Room(2).run(again):
        assert "the checkpoint of step 2 cannot be written: rank " in words
        assert "No space left on device" in words
        assert f"the last good one is {folder / 'step-00000001'}" in words
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]
    assert store.verify(Store(folder).path(1)) == []
    (small_disk / "large").unlink()
    Store(folder).set_aside(Store(folder).path(1))
    _one(folder, 2, asynchronous)  # once there is room

"""Where figures are written, beyond the run's own record. ``tests/engines/test_loggers.py`` reads back what real runs wrote."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from dsframe.config import load
from dsframe.run_dir import loggers
from dsframe.run_dir.loggers import Loggers


def make(file, folder, done=0):
    config = load({"train_batch_size": 4} | file)
    return Loggers(config, {}, folder, train_batch_size=4, done_steps=done)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_a_resumed_run_goes_on_with_its_figures_and_a_new_one_begins_again(tmp_path):
    file = {"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    first = make(file, tmp_path)
    for step in (1, 2, 3):
        first.write({"step": step, "loss": 1.0 / step, "gradient_norm": None, "rate": float("inf")})
    first.write({"run": {"size": 4}})
    first.write({"step": 3, "evaluation": {"loss": 0.5}})
    first.close()
    found = scalars(tmp_path / "job")
    assert found["train/samples"] == [(1, 4.0), (2, 8.0), (3, 12.0)]
    assert set(found) == {"train/loss", "train/samples", "eval/loss"}, "nothing that is no finite number"
    again = make(file, tmp_path, done=2)
    again.write({"step": 3, "loss": 0.25})
    again.close()
    assert scalars(tmp_path / "job")["train/loss"] == [(1, 1.0), (2, 0.5), (3, 0.25)]
    new = make(file, tmp_path)
    new.write({"step": 1, "loss": 9.0})
    new.close()
    assert scalars(tmp_path / "job")["train/loss"] == [(1, 9.0)]


@pytest.mark.parametrize("done", [0, 1])
def test_a_run_deletes_nothing_that_another_run_has_written(here, done):
    """A new run unlinked by a pattern all event files of a folder that runs share."""
    place = {"enabled": True, "output_path": "shared", "job_name": "job"}
    file = {"tensorboard": place}
    for name in ("first", "second", "second"):  # the last one starts again
        (here / name).mkdir(exist_ok=True)
        found = make(file, here / name, done=done)
        found.write({"step": 1 + done, "loss": 1.0 if name == "first" else 2.0})
        found.close()
        if name == "first":
            events = {path: path.read_bytes() for path in (here / "shared" / "job").glob("events.*")}
            assert len(events) == 1
    assert {path: path.read_bytes() for path in events} == events
    assert len(list((here / "shared" / "job").glob("events.*"))) == (2 if done == 0 else 3)


def test_by_default_a_run_logs_into_its_own_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = make({"tensorboard": {"enabled": True}}, tmp_path)
    found.write({"step": 1, "loss": 1.0})
    found.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 1


def test_a_package_that_is_missing_is_an_error_before_anything_starts(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    config = load({"train_batch_size": 4, "wandb": {"enabled": True}})
    (problem,) = loggers.missing(config)
    assert (problem.severity, problem.path) == ("error", "wandb")
    assert "pip install wandb" in problem.remedy


def test_wandb_goes_on_with_the_run_that_it_has_begun_and_learns_how_it_ended(tmp_path, monkeypatch):
    told = []

    def init(**given):
        told.append((given["id"], given["resume"], sys.argv[1]))
        return SimpleNamespace(
            id="one",
            log=lambda values, step: told.append((values, step)),
            finish=lambda exit_code: told.append(exit_code),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=True))
    monkeypatch.setattr(sys, "argv", ["train", "--api-key=V"])
    for done, finished in ((0, False), (2, True)):
        run = make({"wandb": {"enabled": True}}, tmp_path, done)
        run.write({"step": 3, "loss": 0.5, "evaluation": {"loss": 0.25}})
        run.close(finished=finished)
    written = {"train/loss": 0.5, "train/samples": 12.0, "eval/loss": 0.25}, 3
    secret = "--api-key=***"
    assert told == [(None, None, secret), written, 1, ("one", "allow", secret), written, 0]
    assert sys.argv[1] == "--api-key=V"


def test_a_logger_that_fails_is_said_once_and_ends_no_training(tmp_path, monkeypatch, capsys):
    """The server of W&B is lost, TensorBoard's folder cannot be made."""

    def lost(*arguments, **named):
        raise RuntimeError("API request to https://me:the-key@host:5000/api/2.0 failed\nwith\nmany lines")

    (tmp_path / "board").write_text("a file, where a folder is wanted")
    place = {"enabled": True, "output_path": str(tmp_path), "job_name": "board"}
    monkeypatch.setattr(loggers, "_Wandb", lambda *_, **__: SimpleNamespace(write=lost, close=lost))
    found = make({"tensorboard": place, "wandb": {"enabled": True}}, tmp_path)
    for step in (1, 2):
        found.write({"step": step, "loss": 1.0})
    found.close()
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("dsframe: tensorboard failed and gets no more metrics; the training continues")
    assert "(RuntimeError: API request to https://host:5000/api/2.0 failed with many lines)" in second

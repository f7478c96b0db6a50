"""A run's record on a disk that is full for a while, or when the run goes on: nothing that was written is lost."""

import json
import resource
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

from dsframe import run
from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.results import Summary
from dsframe.run_dir import record as record_module
from dsframe.run_dir.loggers import Loggers
from dsframe.run_dir.names import LOGGER_ID
from dsframe.run_dir.record import Record, read_metrics, read_summary
from dsframe.tools.report.runs import numbers, read_run
from tests.engines.odd_task import Odd
from tests.files import ds_config
from tests.processes import run_program

SUMMARY = Summary(3, 1.0, 8.0, "samples", 8, 0.5, 1.0, {}, (2**20,), 0)


def record(directory, said, done_steps=0, loggers=Loggers):
    file = ds_config(8, "SGD")
    device, batch = SimpleNamespace(type="cpu"), SimpleNamespace(train_batch_size=8)
    plan = SimpleNamespace(directory=directory, config=load(file), world=World(), device=device, batch=batch)
    about = {"engine": "single", "description": "PyTorch, one process", "start_seconds": 1.0}
    return Record(plan, about, done_steps, loggers=loggers, say=said.append)


@contextmanager
def full(size):
    """No file grows beyond ``size`` bytes: on the way there, a line is half written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps(directory):
    return [line["step"] for line in read_metrics(directory) if "step" in line]


def test_a_disk_that_is_full_for_a_while(tmp_path):
    said = []
    own = record(tmp_path, said)
    own.write({"step": 1, "loss": 3.0})
    with full((tmp_path / "metrics.jsonl").stat().st_size + 7):
        own.write({"step": 2, "loss": 2.0})
        own.started({"engine": 1.0})
        assert steps(tmp_path) == [1]  # with half a line, which nobody reads
    own.write({"step": 3, "loss": 1.0})
    assert steps(tmp_path) == [1, 2, 3]
    with full(0):
        own.write({"step": 4, "loss": 1.0})
    own.finish(SUMMARY)
    assert read_summary(tmp_path)["steps"] == 3
    assert "directory" not in read_summary(tmp_path), "it may be moved"
    assert read_summary(tmp_path)["startup_seconds"] == {"engine": 1.0}
    (at,) = [line["at"] for line in read_metrics(tmp_path) if "at" in line]
    assert abs(time.time() - at) < 100
    assert [record_module.finished(tmp_path, number) for number in (2, 3)] == [False, True]
    (tmp_path / "summary.json").write_text("{")
    assert not record_module.finished(tmp_path, 3)
    line, _ = said  # each time
    assert line.startswith(f"warning: the record in {tmp_path} cannot be written ([Errno 27] File too large")


def test_one_that_stays_full(tmp_path):
    """The training comes to its end, and each half of what happened is said."""
    said = []
    own = record(tmp_path, said)
    with full(0):
        own.write({"step": 1, "loss": 3.0})
        own.finish(SUMMARY)
    assert steps(tmp_path) == []
    assert not (tmp_path / "summary.json").exists()
    assert len(said) == 2


def test_a_run_that_goes_on_keeps_its_curve_whatever_happens(tmp_path):
    own = record(tmp_path, [])
    for step in (1, 2, 3, 4):
        own.write({"step": step, "loss": 1.0})
    own.close(finished=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    origin = (tmp_path / "run.json").read_text()
    with full(10):
        again = record(tmp_path, [], done_steps=3)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert lines[-2:] == [json.dumps({"step": 4, "loss": 1.0}), "{"]  # nothing is lost yet, should it be killed now
        assert (tmp_path / "run.json").read_text() == origin
        again.write({"step": 4, "loss": 0.5})
    again.write({"step": 5, "loss": 0.5})
    again.close(finished=True)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert sum("run" in line for line in read_metrics(tmp_path)) == 2
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_a_run_that_is_complete_stays_as_it_is(tmp_path, capsys):
    """--resume auto once more: its rate, its loss and its seconds are those of the training."""
    file = ds_config(4, "SGD", 0.01, engine="single", steps=3, threads_per_rank=1, run_dir=str(tmp_path))
    run.execute(load(file), task=Odd(), world=World(), quiet=True)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    assert json.loads(before["summary.json"])["rate"] > 0
    run.execute(load(file), task=Odd(), world=World(), resume="auto")
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")} == before
    assert f"dsframe: {tmp_path} is complete: all 3 steps are done" in capsys.readouterr().err
    file["dsframe"]["steps"] = 5
    run.execute(load(file), task=Odd(), world=World(), resume="auto", quiet=True)
    assert read_summary(tmp_path)["steps"] == 5
    assert steps(tmp_path)[-1] == 5


def test_what_may_hold_accounts_is_the_owners(tmp_path):
    (tmp_path / "run.json").write_text("of an earlier run, open to all")
    record(tmp_path, []).close(finished=False)
    for name in ("run.json", "config.json"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_secrets_of_the_command_line_are_not_recorded(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--set", "wandb.api_key=abc123", "--hub-token", "def456"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="dsframe.train"))
    origin = record_module.provenance()
    assert "model name" not in origin["cpu"]
    command = origin["command"]
    assert command[:3] == ["python", "-m", "dsframe.train"]
    assert "wandb.api_key=***" in command
    assert not {"abc123", "def456"} & {word.rpartition("=")[2] for word in command}


def test_a_second_run_in_a_directory_keeps_the_record_of_the_first(tmp_path):
    said = []
    record(tmp_path, said).close(finished=False)  # one that has trained nothing
    for number in range(2):
        current = record(tmp_path, said)
        (tmp_path / LOGGER_ID).touch()
        (tmp_path / "tensorboard").mkdir()
        (tmp_path / "tensorboard" / f"{number}").touch()
        current.write({"step": 1, "loss": float(number)})
        current.finish(SUMMARY)
    current = record(tmp_path, said)
    current.write({"step": 1, "loss": 2.0})
    current.close(finished=False)
    before = [(tmp_path / f"earlier.{number + 1}") for number in range(2)]
    assert said == [f"the record of an earlier run is now in {folder}" for folder in before]
    assert [read_metrics(folder)[-1]["loss"] for folder in (*before, tmp_path)] == [0.0, 1.0, 2.0]
    assert [[path.name for path in (folder / "tensorboard").iterdir()] for folder in before] == [["0"], ["1"]]
    assert all(read_summary(folder)["steps"] == 3 for folder in before)
    assert all({LOGGER_ID, "run.json"} <= {path.name for path in folder.iterdir()} for folder in before)
    (tmp_path / "summary.json").touch()
    record(tmp_path, said, done_steps=1).close(finished=False)
    assert len(said) == 2, "a run that goes on"
    assert not (tmp_path / "summary.json").exists(), "it has not finished"


def test_figures_of_a_run_elsewhere_are_not_gone_on_with(tmp_path):
    """It goes on from the checkpoint of another run, whose record is in that one's directory."""
    done = []
    loggers = SimpleNamespace(write=done.append, close=lambda *, finished: done.append(finished))
    own = record(tmp_path, [], 3, lambda *given: done.append(given[-1]) or loggers)
    own.write({"step": 4})
    own.close(finished=False)
    first, _, *others = done
    assert (first, others) == (0, [{"step": 4}, False])


def test_a_run_names_the_commit_of_its_folder(tmp_path):
    assert record_module.git(tmp_path) is None
    (tmp_path / "known").touch()
    for words in ("init", "add known", "-c user.name=a -c user.email=a commit -m a"):
        run_program(["git", *words.split()], cwd=tmp_path)
    (tmp_path / "unknown").touch()
    assert record_module.git(tmp_path)["changed"] is False
    (tmp_path / "known").write_text("another")
    assert record_module.git(tmp_path)["changed"] is True


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_at_any_depth(tmp_path):
    nan = float("nan")
    own = record(tmp_path, [])
    own.write({"step": 1, "loss": nan, "evaluation": {"loss": nan, "accuracy": 0.5, "worst": [float("inf")]}})
    own.finish(replace(SUMMARY, loss=nan, rate=nan, metrics={"loss": nan, "accuracy": 0.5}))
    written = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written[-1] == {"step": 1, "loss": None, "evaluation": {"loss": None, "accuracy": 0.5, "worst": [None]}}
    finished = strict((tmp_path / "summary.json").read_text())
    assert (finished["loss"], finished["metrics"]) == (None, {"loss": None, "accuracy": 0.5})
    assert finished["rate"] is None
    run = read_run(tmp_path, "run")
    assert strict(json.dumps(numbers(run, run)))

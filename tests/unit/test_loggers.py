"""Where figures are written, beyond the run's own record. ``tests/engines/test_loggers.py`` reads back what real runs wrote."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import dsframe
from dsframe.config import load
from dsframe.run_dir import loggers
from dsframe.run_dir.loggers import Loggers
from tests.files import ds_config


def make(file: dict[str, Any], folder: Path, done: int = 0) -> Loggers:
    config = load({"train_batch_size": 4} | file)
    return Loggers(config, {}, folder, train_batch_size=4, done_steps=done)


def test_a_resumed_run_goes_on_with_its_figures_and_a_new_one_begins_again(tmp_path: Path) -> None:
    file = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    first = make(file, tmp_path)
    for step in (1, 2, 3):
        first.write({"step": step, "loss": 1.0 / step, "gradient_norm": None, "rate": float("inf")})
    first.close()
    table = tmp_path / "job" / "train_loss.csv"
    assert table.read_text().splitlines() == ["step,loss", "1,1.0", "2,0.5", f"3,{1 / 3}"]
    samples = table.with_name("train_samples.csv")
    assert samples.read_text().splitlines() == ["step,samples", "1,4.0", "2,8.0", "3,12.0"]
    assert sorted(table.parent.glob("*.csv")) == [table, samples], "nothing that is no finite number"
    again = make(file, tmp_path, done=2)
    again.write({"step": 3, "loss": 0.25})
    assert table.read_text().splitlines() == ["step,loss", "1,1.0", "2,0.5", "3,0.25"]
    make(file, tmp_path).write({"step": 1, "loss": 9.0})
    assert table.read_text().splitlines() == ["step,loss", "1,9.0"]


@pytest.mark.parametrize("done", [0, 1])
def test_a_run_deletes_nothing_that_another_run_has_written(here: Path, done: int) -> None:
    """A new run unlinked by a pattern all event files of a folder that runs share, and emptied their tables."""
    place = {"enabled": True, "output_path": "shared", "job_name": "job"}
    file = {"csv_monitor": place, "tensorboard": place}
    for name in ("first", "second", "second"):  # the last one starts again
        (here / name).mkdir(exist_ok=True)
        found = make(file, here / name, done=done)
        found.write({"step": 1 + done, "loss": 1.0 if name == "first" else 2.0})
        found.close()
        if name == "first":
            events = {path: path.read_bytes() for path in (here / "shared" / "job").glob("events.*")}
            rows = (here / "shared" / "job" / "train_loss.csv").read_text().splitlines()
            assert len(events) == 1
    assert {path: path.read_bytes() for path in events} == events
    assert (here / "shared" / "job" / "train_loss.csv").read_text().splitlines() == rows
    (second,) = (here / "shared" / "job").glob("*/train_loss.csv")
    assert second.read_text().splitlines() == ["step,loss", f"{1 + done},2.0"]
    assert len(list((here / "shared" / "job").glob("events.*"))) == (2 if done == 0 else 3)


def test_by_default_a_run_logs_into_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = make({"csv_monitor": {"enabled": True}, "tensorboard": {"enabled": True}}, tmp_path)
    found.write({"step": 1, "loss": 1.0})
    found.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "csv" / "train_loss.csv").exists()
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 1


def test_comet_gets_what_its_section_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the calls that DeepSpeed's own monitor makes; tests/engines/test_loggers.py has the package itself."""
    said: list[Any] = []
    kept: list[list[str]] = []
    words = ["train", "--set", "comet.api_key=the-key-of-an-account"]
    monkeypatch.setattr(sys, "argv", words)

    class Experiment:
        def set_name(self, name: str) -> None:
            said.append(name)

        def log_metric(self, name: str, value: float, step: int) -> None:
            said.append((name, value, step))

        def end(self) -> None:
            said.append("end")

    def start(**options: Any) -> Experiment:
        said.append({key: value for key, value in options.items() if value is not None})
        kept.append(sys.argv)  # the list itself, as Comet does, which writes down later what is in it
        return Experiment()

    module = ModuleType("comet_ml")
    module.__spec__ = ModuleSpec("comet_ml", None)
    module.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    section = {"enabled": True, "project": "p", "online": False, "experiment_name": "n", "samples_log_interval": 8}
    found = make({"comet": section}, tmp_path)
    for step in (1, 2, 3):
        found.write({"step": step, "loss": float(step)})
    found.close()
    steps = [
        (name, value * step, step) for step in (1, 3) for name, value in (("train/loss", 1.0), ("train/samples", 4.0))
    ]
    assert said == [{"project": "p", "online": False}, "n", *steps, "end"]
    assert kept == [["train", "--set", "comet.api_key=***"]]
    assert sys.argv is words


def test_a_logger_that_fails_is_said_once_and_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Comet's server is lost, TensorBoard's folder cannot be made; the third goes on."""

    def lost(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("API request to https://me:the-key@host:5000/api/2.0 failed\nwith\nmany lines")

    (tmp_path / "board").write_text("a file, where a folder is wanted")
    place = {"enabled": True, "output_path": str(tmp_path), "job_name": "board"}
    monkeypatch.setattr(loggers, "_Comet", lambda *_, **__: SimpleNamespace(write=lost, close=lost))
    sections = {"tensorboard": place, "csv_monitor": place | {"job_name": "table"}}
    found = make(sections | {"comet": {"enabled": True}}, tmp_path)
    for step in (1, 2):
        found.write({"step": step, "loss": 1.0})
    found.close()
    assert len((tmp_path / "table" / "train_loss.csv").read_text().splitlines()) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("dsframe: tensorboard failed and gets no more metrics; the training continues")
    assert "(RuntimeError: API request to https://host:5000/api/2.0 failed with many lines)" in second


def test_a_package_that_is_missing_is_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    config = load({"train_batch_size": 4, "wandb": {"enabled": True}, "csv_monitor": {"enabled": True}})
    (problem,) = loggers.missing(config)
    assert (problem.severity, problem.path) == ("error", "wandb")
    assert "pip install wandb" in problem.remedy


class Pictures(dsframe.Hooks):
    def on_evaluation_batch(self, run: dsframe.RunView, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        run.log_image("outputs", outputs[:1, :1].reshape(1, 1, 1).expand(3, 4, 5))


def test_hooks_send_images_of_an_evaluation_to_tensorboard(here: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data = torch.utils.data.TensorDataset(torch.rand(8, 2), torch.rand(8, 1))
    task = dsframe.Task.from_module(lambda: torch.nn.Linear(2, 1), torch.nn.MSELoss(), data, data)
    task.hooks = [Pictures()]
    file = ds_config(
        4,
        "SGD",
        0.1,
        sections={"tensorboard": {"enabled": True}},
        engine="single",
        steps=2,
        run_dir="run",
    )
    dsframe.fit(task, file)
    events = EventAccumulator("run/tensorboard", size_guidance={"images": 0})
    events.Reload()
    assert [(image.step, image.height, image.width) for image in events.Images("outputs")] == [(2, 4, 5)] * 2

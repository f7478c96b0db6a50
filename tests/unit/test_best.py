"""The best checkpoint: which one it is, that it stays, and that commands find it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import dsframe
from dsframe import cli
from dsframe.checkpoint import store
from dsframe.data import TensorSource
from dsframe.errors import CheckpointError, DataError, TaskError
from dsframe.inference import load_model
from dsframe.results import best_step
from tests.files import ds_config, read_rows
from tests.lines import HeldOut


class Told(HeldOut):
    """Its evaluations come to what they are told to come to; the trial counts nothing."""

    values = (math.nan, 0.5, 0.9, 0.9, 0.6)
    calls = 0

    def finalize(self, sums):
        value = self.values[min(self.calls, len(self.values) - 1)]
        self.calls += 1
        return {"precision": value}


def file(**more):
    checkpoints = {"every_steps": 2, "keep_last": 1, "keep_best": "precision:max"}
    settings = {"engine": "single", "steps": 10, "eval_every_steps": 2, "run_dir": "run", "checkpoints": checkpoints}
    return ds_config(8, "SGD", 0.01, **{**settings, **more})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run" / "checkpoints"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_of_equal_values_the_first_is_the_best():
    rated = {2: {"loss": 1.0}, 4: {"loss": 0.5}, 6: {"loss": 0.5}, 8: {"loss": math.nan}, 10: {"loss": None}, 12: {}}
    assert best_step(rated, "loss:min") == 4
    assert best_step(rated, "loss:max") == 2
    assert best_step(rated, "accuracy:max") is None


def test_the_best_stays_and_is_found(folder, capsys, monkeypatch):
    dsframe.fit(Told(), file())
    said = capsys.readouterr().err
    assert names(folder) == ["best", "latest", "step-00000006", "step-00000010"]
    assert "warning: keep_best: precision is NaN here, so this checkpoint cannot be the best" in said
    assert "  best        precision 0.9000 after step 6" in said
    assert f"  best saved  {Path('run/checkpoints/step-00000006')}" in said
    best = load_model("run", Told(), best=True).state_dict()
    assert all(torch.equal(load_model(folder / "best", Told()).state_dict()[name], best[name]) for name in best)
    assert not torch.equal(best["weight"], load_model("run", Told()).state_dict()["weight"])
    assert cli.main(["export", "run", "--best"]) == 0
    assert (folder / "step-00000006.safetensors").is_file()
    dsframe.fit(Told(), file(steps=14), resume="best")
    assert "continuing after step 6" in capsys.readouterr().err
    assert "step-00000006" in names(folder)
    (folder / "best").write_text("../../elsewhere\n")
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        store.complete(Path("run"), best=True)
    (folder / "best").unlink()
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        store.complete(Path("run"), best=True)


def test_the_last_evaluation_may_be_the_best(folder):
    task = Told()
    task.values = (0.1, 0.2, 0.3)
    dsframe.fit(task, file(steps=6))
    assert names(folder) == ["best", "latest", "step-00000006"]
    assert (folder / "best").read_text() == "step-00000006\n"


def test_an_evaluation_that_is_not_a_number_is_read_again(folder):
    """It joins the checkpoint, and early stopping takes it in when the run goes on."""

    class Stopped(Told):
        values = (0.5, math.nan)

    dsframe.fit(Stopped(), file(steps=4))
    assert store.read_manifest(folder / "step-00000004")["evaluation"] == {
        "loss": pytest.approx(2, abs=9),
        "precision": None,
    }
    stop = {"metric": "precision:max", "patience": 2}
    summary = dsframe.fit(Stopped(), file(stop=stop), resume="auto")
    assert "precision is not better in 2 evaluation(s)" in summary.stopped


def test_a_resume_from_an_earlier_step_leaves_no_pointer_to_what_is_moved_away(folder):
    dsframe.fit(Told(), file(checkpoints={"every_steps": 2, "keep_last": 9, "keep_best": "precision:max"}))
    assert (folder / "best").read_text() == "step-00000006\n"
    task = Told()
    task.values = (0.1, 0.2)
    dsframe.fit(task, file(steps=6), resume=str(folder / "step-00000004"))
    assert (folder / "best").read_text() == "step-00000004\n"


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"checkpoints": {"every_steps": 2, "keep_best": "recall:max"}}, r"dsframe\.checkpoints\.keep_best"),
        ({"stop": {"metric": "recall:max", "patience": 1}}, r"dsframe\.stop\.metric"),
    ],
)
def test_a_metric_that_nobody_reports_is_refused_before_training(more, key, folder):
    with pytest.raises(TaskError, match=f"{key}: no metric 'recall' in the evaluation; it has loss, precision"):
        dsframe.fit(Told(), file(**more))
    assert not folder.exists() or names(folder) == []


def test_several_sets_have_names(folder):
    class Sets(Told):
        values = (3.0, 3.0, 2.0, 2.0, 4.0, 4.0)

        def eval_data(self):
            return {"val": self.train_data(), "clean": TensorSource(*(rows[:5] for rows in self.train_data()._data))}

    wanted = {"every_steps": 2, "keep_best": "clean/precision:max", "keep_last": 1}
    summary = dsframe.fit(Sets(), file(steps=6, checkpoints=wanted))
    assert list(summary.metrics) == ["val/loss", "val/precision", "clean/loss", "clean/precision"]
    rows = read_rows(Path("run/metrics.jsonl"))
    assert [row["evaluation"]["clean/precision"] for row in rows if "evaluation" in row] == [3.0, 2.0, 4.0]
    with pytest.raises(
        TaskError, match=r"keep_best: no metric 'precision' .* it has val/loss, val/precision, clean/loss"
    ):
        dsframe.fit(Sets(), file())


def test_an_empty_one_of_several_sets_is_named(folder):
    class Empty(Told):
        def eval_data(self):
            return {"val": self.train_data(), "clean": TensorSource(torch.zeros(0, 2), torch.zeros(0, 1))}

    with pytest.raises(DataError, match='the evaluation data set "clean" is empty'):
        dsframe.fit(Empty(), file())

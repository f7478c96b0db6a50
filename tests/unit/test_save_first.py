"""An evaluation that fails, or is stopped, costs no training: the state before it is on the disk."""

import os
import signal
import time

import pytest
import torch

from dsframe import run
from dsframe.checkpoint.store import Store, read_manifest, verify
from dsframe.errors import StoppedError
from dsframe.hooks import Hooks
from tests.engines.odd_task import Odd
from tests.files import ds_config, read_rows


class Happening(Hooks):
    """Something happens in each evaluation, and not in the trial."""

    def __init__(self, happens):
        self.happens = happens

    def on_evaluation_batch(self, run, outputs, targets):
        self.happens()


class Disturbed(Odd):
    """Evaluation draws random numbers."""

    def __init__(self, happens, **options):
        super().__init__(**options)
        self.hooks = (Happening(happens),)

    def eval_data(self):
        return self.train_data()

    def metrics(self, outputs, targets):
        torch.rand(3)
        return super().metrics(outputs, targets)


def fit(folder, happens, **settings):
    kept = {"every_steps": 2, "keep_last": 1, "keep_best": "loss:min"}
    own = {"eval_every_steps": 2, "checkpoints": kept, **settings.pop("dsframe", {})}
    file = ds_config(8, "SGD", 0.1, engine="single", steps=6, run_dir=str(folder), **own)
    return run.fit(Disturbed(happens), file, **settings)


def fail():
    raise MemoryError("the evaluation is too large")


def stop():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)


def weights(folder):
    return {name: entry for name, entry in read_manifest(folder)["files"].items() if name.endswith(".safetensors")}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where the process would end
@pytest.mark.parametrize(("happens", "error"), [(fail, MemoryError), (stop, StoppedError)])
def test_the_step_before_an_evaluation_is_saved(happens, error, tmp_path):
    with pytest.raises(error):
        fit(tmp_path / "a", happens)
    store = Store(tmp_path / "a" / "checkpoints")
    assert [path.name for path in store.newest_first()] == ["step-00000002"]
    whole = fit(tmp_path / "b", lambda: None)
    with pytest.raises(StoppedError):
        fit(tmp_path / "a", stop, resume="auto")  # stopped again in the evaluation that is made up for
    again = fit(tmp_path / "a", lambda: None, resume="auto")  # the evaluation that is missing is made up for
    assert again.metrics == whole.metrics
    assert again.loss == whole.loss
    for name in ("a", "b"):
        newest = Store(tmp_path / name / "checkpoints").newest_first()[0]
        assert verify(newest) == []
        assert read_manifest(newest)["evaluation"] == whole.metrics
    assert weights(tmp_path / "a/checkpoints/step-00000006") == weights(tmp_path / "b/checkpoints/step-00000006")


def test_a_signal_in_an_evaluation_saves_where_no_checkpoint_was_due(tmp_path):
    with pytest.raises(StoppedError, match="after step 2"):
        fit(tmp_path, stop, dsframe={"checkpoints": {"every_steps": 100}})
    assert [path.name for path in Store(tmp_path / "checkpoints").newest_first()] == ["step-00000002"]


def test_the_best_is_kept_by_figures_that_come_later(tmp_path):
    for name, more in (("now", {}), ("background", {"asynchronous": True})):
        checkpoint = {"every_steps": 2, "keep_last": 1, "keep_best": "loss:min", **more}
        fit(tmp_path / name, lambda: None, dsframe={"checkpoints": checkpoint})
        found = {p.name: read_manifest(p)["evaluation"] for p in Store(tmp_path / name / "checkpoints").newest_first()}
        assert found, name
        assert all(found.values()), found


def test_before_training_and_on_some_samples(tmp_path):
    settings = {"eval_before_training": True, "eval_samples": 5, "eval_every_steps": 4}
    seen = []

    class Counted(Odd):
        def eval_data(self):
            return self.train_data()

        def metrics(self, outputs, targets):
            seen.append(len(targets))
            return super().metrics(outputs, targets)

    file = ds_config(4, "SGD", 0.1, engine="single", steps=4, run_dir=str(tmp_path), **settings)
    run.fit(Counted(), file)
    # step 0, step 4; of the trial before training nothing stays
    assert seen == [4, 1, 4, 1]
    lines = read_rows(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "evaluation" in line] == [0, 4]
    file["dsframe"]["steps"] = 8
    run.fit(Counted(), file, resume="auto")  # what goes on has been evaluated
    lines = read_rows(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "evaluation" in line] == [0, 4, 8]

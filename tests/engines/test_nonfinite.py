"""Losses that are no number: every engine stops with the culprit's name, or leaves out the same updates."""

import itertools
import math
from pathlib import Path

import pytest

import dsframe
from dsframe.data.sampler import Sampler
from dsframe.errors import TrainingError
from dsframe.run_dir.record import read_metrics, read_summary
from tests import kept
from tests.engines.nan_task import BROKEN, OneBrokenSample
from tests.files import ds_config

STEPS = 20


def configuration(folder, engine="single", stage=0, **settings):
    own = {"steps": STEPS, "threads_per_rank": 1, "run_dir": str(folder / f"{engine}-{stage}"), "log_every_steps": 1}
    sections = {"zero_optimization": {"stage": stage}}
    return ds_config(8, "AdamW", 1e-2, sections=sections, **{"engine": engine, **own, **settings})


def broken_step():
    """The first step, from 1, that meets the broken sample."""
    sampler = Sampler(64, 8, seed=0)
    return next(step + 1 for step in range(8) if any(BROKEN in rows for _, rows in sampler.global_batch(step)))


def losses(folder):
    return {one["step"]: one["loss"] for one in read_metrics(folder) if "loss" in one}


ENGINES = {
    1: ("single", "deepspeed:0", "deepspeed:3", "fsdp"),
    2: ("ddp", "horovod", "deepspeed:0", "deepspeed:2", "deepspeed:3", "deepspeed:pipeline", "fsdp"),
}
LOOK_BY_THEMSELVES = {"deepspeed:2", "deepspeed:3"}
"""Leave such an update out before anybody asks them to; the others have it in their weights when they stop."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Every engine, met by a broken sample: its folder has what it trains where it skips updates, and where it stops; what it says
    then is in ``said``."""
    folder = tmp_path_factory.mktemp("nonfinite")
    for processes, cases in ENGINES.items():
        for case in cases:
            place = folder / f"{processes}" / case
            place.mkdir(parents=True)
            kept.train(place, document(case, "skip", on_nonfinite="skip"), processes).check()
            stopped = kept.train(place, document(case, "stop"), processes)
            assert stopped.returncode == TrainingError.exit_code, stopped
            (place / "said").write_text(stopped.stderr)
    return folder


def document(case, run_dir, **settings):
    engine, _, how = case.partition(":")
    task = {"name": "tests.engines.nan_task:OneBrokenSample"}
    stage = int(how) if how.isdigit() else 0
    file = configuration(Path(), engine, stage, task=task, **{"run_dir": run_dir, **settings})
    file["scheduler"] = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.8}}
    return file | {"gradient_accumulation_steps": 2} | ({"pipeline": {"stages": 2}} if how == "pipeline" else {})


def test_every_engine_leaves_out_the_same_updates(jobs):
    curves = {folder: losses(folder / "skip") for folder in jobs.glob("*/*")}
    first = curves[jobs / "1" / "single"]
    missing = [step for step, loss in first.items() if loss is None]
    assert missing[0] == broken_step()
    assert len(missing) == 3
    for folder, curve in curves.items():
        assert [step for step, loss in curve.items() if loss is None] == missing, folder
        assert max(abs(curve[step] - first[step]) for step in first if step not in missing) < 1e-5, folder
        assert read_summary(folder / "skip")["skipped_steps"] == 3, folder


def test_without_skipping_every_engine_stops_and_says_what_is_broken(jobs):
    step = broken_step()
    for folder in jobs.glob("*/*"):
        text = (folder / "said").read_text()
        rank = 0 if folder.parent.name == "1" or folder.name == "deepspeed:pipeline" else holder(step)
        assert f"step {step}: the loss of rank {rank} is not finite since step {step}, made of samples " in text, folder
        assert f"of these, {BROKEN} hold NaN or infinity themselves" in text, folder
        still = folder.name in LOOK_BY_THEMSELVES
        after = "every parameter is finite" if still else "4 of 4 parameters are not finite now: 0.weight, 0.bias, "
        assert after in text, (folder, text)
        assert max(losses(folder / "stop")) < step, folder


def holder(step, accumulation=2):
    """Of two ranks the one that reads the broken sample in ``step``."""
    sampler, size = Sampler(64, 8, seed=0), 4 // accumulation
    return next(
        rank
        for rank in (0, 1)
        for micro in range(accumulation)
        for _, rows in sampler.micro_batch(step - 1, micro, rank, 2, size)
        if BROKEN in rows
    )


def test_the_rank_is_named_however_late_it_is_seen_and_nothing_broken_is_saved(tmp_path):
    """On two ranks, logged long after and with a checkpoint due in between."""
    late = {"log_every_steps": 1000, "checkpoints": {"every_steps": 1}}
    task = {"name": "tests.engines.nan_task:OneBrokenSample"}
    failed = kept.train(tmp_path, configuration(tmp_path, "ddp", 0, task=task, **late), 2)
    assert failed.returncode != 0
    step = broken_step()
    told = f"step {step}: the loss of rank {holder(step, 1)} is not finite since step {step}"
    assert told in failed.stderr, str(failed)
    assert f"of these, {BROKEN} hold NaN" in failed.stderr
    saved = sorted((tmp_path / "ddp-0" / "checkpoints").glob("step-*"))
    assert [path.name for path in saved] == [f"step-{number:08}" for number in (step - 2, step - 1)]  # keep_last is 2


@pytest.mark.parametrize("settings", [{"steps": 3}, {"steps": 9}, {"steps": 9, "checkpoints": {"every_steps": 1}}])
def test_gradients_alone_end_the_run_before_they_are_saved(tmp_path, monkeypatch, settings):
    """sqrt at 0: the loss of the third step is a number, its gradients are none, nor is any loss after it."""
    calls = itertools.count(1)

    def loss(self, outputs, targets):
        number = outputs.square().mean()
        trains = not self.context.evaluating  # not the look at the kind of loss
        return number + (outputs * 0.0).sqrt().sum() if trains and next(calls) == 3 else number

    monkeypatch.setattr(OneBrokenSample, "loss", loss)
    task = OneBrokenSample(broken=64)  # which is none of them
    with pytest.raises(TrainingError, match="the gradients are not finite at step 3, though the loss is"):
        dsframe.fit(task, configuration(tmp_path, log_every_steps=1000, **settings))
    saved = sorted(path.name for path in (tmp_path / "single-0" / "checkpoints").glob("step-*"))
    assert saved == (["step-00000001", "step-00000002"] if "checkpoints" in settings else [])


def test_a_fixed_loss_scale_that_does_not_fit_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(OneBrokenSample, "loss", lambda self, outputs, targets: outputs.float().sum() * math.nan)
    monkeypatch.setattr("dsframe.training.finite.SKIPS_IN_A_ROW", 3)
    config = configuration(tmp_path) | {"fp16": {"enabled": True, "loss_scale": 1024}}
    with pytest.raises(TrainingError, match="step 3: "):
        dsframe.fit(OneBrokenSample(), config)

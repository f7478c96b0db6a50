"""Evaluations of programs whose batches are not rows of tensors: the plain loop's figures on any engine, ranks and micro-batch."""

import json

import pytest

from tests import kept
from tests.engines.evaluated import ENGINES, MICRO_BATCHES, SAMPLES, TASKS, by_hand
from tests.files import ds_config, read_json, read_rows
from tests.processes import reported, run_ranks, warm

SETUPS = [
    ("single", 1),
    *((engine, ranks) for engine in ENGINES for ranks in (1, 2, 3) if engine not in ("single", "kept")),
]
QUICK = {("single", 1), ("ddp", 3), ("horovod", 2), ("fsdp", 2), ("zero1", 2), ("zero3", 3)}


@pytest.mark.parametrize(
    ("engine", "ranks"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.long) for one in SETUPS]
)
def test_it_is_the_plain_loop(engine, ranks, tmp_path):
    report = reported("evaluated", tmp_path, ranks, [engine])
    for name, found in report.items():
        expected = by_hand(name)
        for size in MICRO_BATCHES:
            assert found[str(size)] == pytest.approx(expected, rel=2e-6), (name, size)
        (line,) = found["said"] or [""]
        assert ("a detector has no loss in evaluation mode" in line) == (name == "Boxes")
    assert set(TASKS) == set(report)


def on(ranks, words, folder):
    line = ["-m", *words]
    return run_ranks(warm(ranks, line), cwd=folder, timeout_seconds=100)


def file(task, engine, **more):
    kind, changes = ENGINES[engine]
    name = f"tests.engines.evaluated:{task}"
    own = {"engine": kind, "task": {"name": name}, "steps": 4, "eval_every_steps": 2, "run_dir": "run", **more}
    return ds_config(6, "AdamW", 0.01, sections=dict(changes), **own)


def test_hooks_see_batches_and_the_model(tmp_path):
    """And the run's best is found by an evaluation on another engine."""
    checkpoints = {"every_steps": 2, "keep_best": "loss:min"}
    document = file("Rated", "zero3", ema={"decay": 0.5, "evaluate": True}, checkpoints=checkpoints)
    kept.train(tmp_path, document, 2).check()
    own, copied, images = read_json(tmp_path / "run" / "seen.json")
    assert own == pytest.approx(copied, rel=1e-6)
    assert images == SAMPLES
    seen = [row for path in (tmp_path / "run").glob("outputs*.jsonl") for row in read_rows(path)]
    assert {step: sum(size for each, size in seen if each == step) for step in (2, 4)} == {2: SAMPLES, 4: SAMPLES}
    words = ["dsframe.tools.evaluate", "run", "--best", "--average", "--engine", "ddp"]
    line = next(row for row in on(2, words, tmp_path).check().output.splitlines() if '{"checkpoint"' in row)
    assert json.loads(line)["metrics"]["loss"] == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("engine", ["kept", "zero3", "fsdp"])
def test_ranks_may_call_the_model_as_often_as_they_like(engine, tmp_path):
    """Also before the first step, when ZeRO-3 has gathered nothing yet: there they waited for each other."""
    kept.train(tmp_path, file("Generates", engine, eval_micro_batch_size=1), 2).check()
    assert "last" in read_json(tmp_path / "run" / "summary.json")["metrics"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_that_ranks_compute_of_their_own_batches_are_refused(ranks, tmp_path):
    """On one process they are of all samples."""
    finished = kept.train(tmp_path, file("Gathers", "ddp" if ranks > 1 else "single"), ranks)
    if ranks == 1:
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["3"] == 1.0
    else:
        assert finished.returncode == 5
        assert "Gathers.finalize: 'boxes' does not follow from the sums over all samples (" in finished.stderr

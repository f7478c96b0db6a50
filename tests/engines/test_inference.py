"""One checkpoint evaluated and predicted with on every engine and on 1, 2 and 3 processes: the same figures and rows."""

import functools
import json

import pytest

from dsframe.run_dir.record import read_summary
from tests import kept
from tests.processes import forked, horovodrun, run_ranks, warm
from tests.unit.test_inference import SAMPLES

TASK = '{"name": "tests.unit.test_inference:Plane"}'


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inference")
    words = ["--config", "zero3.json", "--engine", "ddp", "--run-dir", str(folder / "run")]
    words += ["--set", f"dsframe.task={TASK}", "--set", "dsframe.steps=5", "--set", "train_batch_size=16"]
    kept.run(folder, words, 2).check()
    return folder / "run"


def on(launcher, processes, *words, **more):
    return run_ranks(launcher(processes, ["-m", "dsframe.tools.evaluate", *words]), timeout_seconds=150, **more)


def metrics(finished):
    finished.check()
    line = next(line for line in finished.output.splitlines() if '{"checkpoint"' in line)
    # mpirun's mark of an output may follow on the same line.
    return json.JSONDecoder().raw_decode(line[line.index("{") :])[0]["metrics"]


def test_evaluations_are_those_of_the_run(trained):
    last = read_summary(trained)["metrics"]
    assert metrics(on(warm, 2, str(trained))) == last  # the same engine and size: to the bit
    for launcher, processes, *engine in (
        (warm, 2, "--engine", "deepspeed"),
        (warm, 3, "--engine", "fsdp"),
        (functools.partial(forked, horovodrun), 2, "--engine", "horovod"),
        (warm, 2, "--engine", "deepspeed", "--set", 'pipeline={"stages": 2}', "--set", "zero_optimization.stage=1"),
    ):
        found = metrics(on(launcher, int(processes), str(trained), *map(str, engine)))
        assert found == pytest.approx(last, rel=1e-6), engine


def test_predictions_are_the_same_on_any_number_of_processes(trained, tmp_path):
    found = []
    for launcher, processes, *engine in (
        (warm, 1, "--engine", "single"),
        (warm, 2, "--engine", "deepspeed"),
        (warm, 3, "--engine", "ddp"),
        (warm, 2, "--engine", "deepspeed", "--set", 'pipeline={"stages": 2}', "--set", "zero_optimization.stage=1"),
    ):
        out = tmp_path / f"{len(found)}.jsonl"
        words = [
            "predict",
            str(trained),
            "--out",
            str(out),
            *map(str, engine),
            "--set",
            "dsframe.eval_micro_batch_size=4",
        ]
        on(launcher, int(processes), *words).check()
        found.append(out.read_text())
    assert len(found[0].splitlines()) == SAMPLES
    assert all(text == found[0] for text in found)

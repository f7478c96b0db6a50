"""Rows of different lengths, padded by the task's collate: the same training on one process and on two ranks."""

import pytest

from dsframe.run_dir.record import read_summary
from dsframe.tools.compare import losses
from tests.processes import run_ranks, warm

FILE = (
    *("--set", "train_batch_size=16", "--set", "gradient_accumulation_steps=2", "--set", "dsframe.steps=6"),
    *("--set", "dsframe.log_every_steps=1"),
    *("--set", 'dsframe.task={"name": "tests.unit.test_collate:Llama"}'),
)


def trained(tmp_path, name, processes, *more):
    words = ["-m", "dsframe.train", "--config", "zero3.json", "--run-dir", name, *FILE, *more]
    run_ranks(warm(processes, words), cwd=tmp_path, timeout_seconds=150).check()
    return losses(tmp_path / name), read_summary(tmp_path / name)["metrics"]


def test_padded_rows_are_the_same_training(tmp_path):
    alone, evaluated = trained(tmp_path, "single", 1, "--engine", "single")
    assert len(alone) == 6
    for engine in ("deepspeed", "fsdp"):
        found, metrics = trained(tmp_path, engine, 2, "--engine", engine)
        assert found == pytest.approx(alone, abs=1e-5), engine
        assert metrics == pytest.approx(evaluated, abs=1e-5), engine

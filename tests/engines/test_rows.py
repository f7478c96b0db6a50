"""Rows of different lengths, padded by the task's collate: the same training on one process and on two ranks."""

import pytest

from dsframe.run_dir.record import read_summary
from dsframe.tools.compare import losses
from tests import kept
from tests.files import ds_config


def trained(tmp_path, engine, processes):
    task = {"name": "tests.unit.test_collate:Llama"}
    settings = {"engine": engine, "task": task, "steps": 6, "log_every_steps": 1, "run_dir": engine}
    zero = {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2}
    kept.train(tmp_path, ds_config(16, "AdamW", 1e-3, sections=zero, **settings), processes).check()
    return losses(tmp_path / engine), read_summary(tmp_path / engine)["metrics"]


def test_padded_rows_are_the_same_training(tmp_path):
    alone, evaluated = trained(tmp_path, "single", 1)
    assert len(alone) == 6
    for engine in ("deepspeed", "fsdp"):
        found, metrics = trained(tmp_path, engine, 2)
        assert found == pytest.approx(alone, abs=1e-5), engine
        assert metrics == pytest.approx(evaluated, abs=1e-5), engine

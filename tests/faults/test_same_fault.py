"""A mistake in the user's code has the same exit code and the same message on each engine."""

import re

import pytest

from dsframe.errors import TaskError
from tests.engines.test_foreign import SETUPS
from tests.files import ds_config, write_json
from tests.processes import run_ranks, warm

ENGINES = ("ddp", "zero3", "horovod", "fsdp")
FAULTS = {
    "model": "the task's code raised ValueError: a mistake in model",
    "forward": "the task's model raised ValueError: a mistake in forward",
    "evaluation": "the task's model raised ValueError: a mistake in evaluation",
    "data": "the task's code raised ValueError: a mistake in data",
    "metrics": "the task's code raised ValueError: a mistake in metrics",
    "hook": "the task's code raised ValueError: a mistake in hook",
    "after_step": "the task's code raised ValueError: a mistake in after_step",
    "vector": "FaultyTask.loss: returned a tensor of shape [ROWS, 1], not a scalar; return its mean",
}
SHORT = {("forward", "zero3"), ("vector", "ddp"), ("after_step", "zero3"), ("metrics", "ddp")}
"""The others in the night."""


def said(fault, processes, document, folder):
    ours = {"task": {"name": "tests.faults.faulty_task:FaultyTask"}, "steps": 3, "run_dir": "run"}
    sections = dict(document)
    ours |= sections.pop("dsframe", {})
    write_json(folder / "file.json", ds_config(8, "Adam", 0.1, sections=sections, **ours))
    words = ["-m", "dsframe.train", "--config", "file.json"]
    finished = run_ranks(warm(processes, words), cwd=folder, timeout_seconds=150, env={"FAULT": fault})
    assert finished.returncode == TaskError.exit_code, finished
    (line,) = {line for line in finished.stderr.splitlines() if "error: " in line and "[rank 1]" not in line}
    return re.sub(r"\[\d+, 1\]", "[ROWS, 1]", line.partition("error: ")[2])


@pytest.mark.parametrize(
    ("fault", "engine"),
    [
        pytest.param(fault, engine, marks=[pytest.mark.long] * ((fault, engine) not in SHORT))
        for fault in FAULTS
        for engine in ENGINES
    ],
)
def test_it_is_the_same_on_each_engine(fault, engine, tmp_path):
    (tmp_path / "single").mkdir()
    (tmp_path / engine).mkdir()
    expected = said(fault, *SETUPS["single"], tmp_path / "single")
    assert FAULTS[fault] in expected
    assert said(fault, *SETUPS[engine], tmp_path / engine) == expected

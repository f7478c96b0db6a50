"""The main job: the default file trains to 0.90 on Fashion-MNIST's test images on both engines, and the table compares them.

All of it takes ten minutes and is for ``make test-all``; the first 100 of its 2,344 steps are here.
"""

import functools

import pytest

from dsframe.run_dir.record import read_summary
from dsframe.tools.compare import table
from tests.processes import deepspeed, horovodrun, run_ranks

LAUNCH = {"deepspeed": deepspeed, "horovod": horovodrun}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("accuracy")


@functools.cache
def trained(name, folder):
    """The summary of the default file's training, once for each engine."""
    command = LAUNCH[name](2, ["-m", "dsframe.train", "--run-dir", name])
    run_ranks(command, cwd=folder, timeout_seconds=800).check()
    return read_summary(folder / name)


@pytest.mark.timeout(600)
def test_the_default_file_begins_to_learn(folder):
    more = ["--set", "dsframe.epochs=null", "--set", "dsframe.steps=100", "--set", "dsframe.eval_samples=2000"]
    command = deepspeed(2, ["-m", "dsframe.train", "--run-dir", "short", *more])
    run_ranks(command, cwd=folder, timeout_seconds=500).check()
    summary = read_summary(folder / "short")
    assert summary["engine"] == "deepspeed"
    assert summary["metrics"]["accuracy"] >= 0.7


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAUNCH)
def test_the_default_file(name, folder):
    summary = trained(name, folder)
    assert summary["engine"] == name
    assert summary["metrics"]["accuracy"] >= 0.90


@pytest.mark.long
@pytest.mark.timeout(1700)
def test_the_table_compares_both_engines(folder):
    for name in LAUNCH:
        trained(name, folder)
    text = table({name: folder / name for name in LAUNCH})
    assert "DeepSpeed ZeRO-3" in text
    assert "Horovod" in text
    for row in ("loss at step 2,344", "evaluation accuracy", "samples/s", "peak memory per rank"):
        assert row in text

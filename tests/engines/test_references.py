"""The textbook engines train as DDP does."""

import pytest

from tests import kept
from tests.engines.ports import moved
from tests.files import ds_config
from tests.processes import reported


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One job for all of them: tests/engines/references.py, which also checks that each keeps the engines' contract."""
    return reported("references", tmp_path_factory.mktemp("references"), 2)


def largest(left, right):
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("case", ["all-reduce", "ring", "server", "model parallel", "averaging sgd"])
def test_it_trains_as_ddp_and_its_state_goes_out_and_in_again(report, case):
    mine, theirs = report[case], report["ddp sgd" if "sgd" in case else "ddp"]
    assert largest(mine["losses"], theirs["losses"]) <= 1e-6
    assert mine["names"] == theirs["names"]
    for left, right in zip(mine["state"], theirs["state"], strict=True):
        assert largest(left, right) <= 1e-5
    assert mine["losses"][-1] < 0.8 * mine["losses"][0]
    assert mine["read_back"] == 0.0
    assert largest(mine["repeated"], mine["losses"][5:]) <= (1e-6 if "averaging" in case else 0.0)


def test_the_servers_own_optimizer_has_the_parameter_groups(tmp_path):
    """One worker waits for nobody, and is one process."""
    assert moved("nanogpt", "reference-async-parameter-server", tmp_path) == moved("nanogpt", "single", tmp_path)


@pytest.mark.parametrize("engine", ["reference-parameter-averaging", "reference-async-parameter-server"])
def test_ranks_with_other_weights_are_not_compared(engine, tmp_path):
    document = ds_config(
        8, "SGD", 0.1, engine=engine, steps=3, task={"name": "tests.engines.foreign_tasks:Rows"}, run_dir="run"
    )
    kept.train(tmp_path, document, 2).check()

"""The textbook engines train as they say they do: the same as DDP, or not the same where theory says that they cannot."""

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


@pytest.mark.parametrize(
    ("case", "other", "bound"),
    [
        ("all-reduce", "ddp", 1e-6),
        ("ring", "ddp", 1e-6),
        ("server", "ddp", 1e-6),
        ("model parallel", "ddp", 1e-6),
        ("averaging sgd", "ddp sgd", 1e-6),
    ],
)
def test_the_same_training(report, case, other, bound):
    mine, theirs = report[case], report[other]
    assert largest(mine["losses"], theirs["losses"]) <= bound
    assert mine["names"] == theirs["names"]
    for left, right in zip(mine["state"], theirs["state"], strict=True):
        assert largest(left, right) <= 10 * bound
    assert mine["losses"][-1] < 0.8 * mine["losses"][0]


def test_the_asynchronous_server_trains_in_its_own_way(report):
    mine, theirs = report["async server"], report["ddp"]
    assert mine["losses"][-1] < 0.8 * mine["losses"][0]
    assert largest(mine["losses"], theirs["losses"]) > 1e-3
    assert [name for name, _, _ in mine["names"]] == [name for name, _, _ in theirs["names"]]
    assert [moments for _, moments, _ in mine["names"]] == [moments for _, moments, _ in theirs["names"]]
    steps = {key: value for _, _, scalars in mine["names"] for key, value in scalars.items()}
    assert steps["step"] == 2 * 5, "each of two workers made five updates before the state was taken"
    assert mine["read_back"] == 0.0


def test_the_servers_own_optimizer_has_the_parameter_groups(tmp_path):
    """One worker waits for nobody, and is one process."""
    assert moved("nanogpt", "reference-async-parameter-server", tmp_path) == moved("nanogpt", "single", tmp_path)


def test_ranks_part_between_two_averages(report):
    every_2 = report["averaging every 2"]
    assert every_2["apart_after_5"] > 1e-3
    assert every_2["apart_after_10"] == 0.0
    assert report["averaging"]["apart_after_5"] == 0.0


def test_the_server_alone_keeps_the_optimizers_state(report):
    assert report["server"]["optimizer_tensors"] == 4
    assert report["all-reduce"]["optimizer_tensors"] == 8


@pytest.mark.parametrize(
    ("case", "bound"),
    [
        ("all-reduce", 0.0),
        ("ring", 0.0),
        ("server", 0.0),
        ("model parallel", 0.0),
        ("averaging sgd", 1e-6),
    ],
)
def test_state_goes_out_and_in_again(report, case, bound):
    assert report[case]["read_back"] == 0.0
    assert largest(report[case]["repeated"], report[case]["losses"][5:]) <= bound


@pytest.mark.parametrize("engine", ["reference-parameter-averaging", "reference-async-parameter-server"])
def test_ranks_with_other_weights_are_not_compared(engine, tmp_path):
    document = ds_config(
        8, "SGD", 0.1, engine=engine, steps=3, task={"name": "tests.engines.foreign_tasks:Rows"}, run_dir="run"
    )
    kept.train(tmp_path, document, 2).check()

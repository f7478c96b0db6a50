"""A run that goes on: from every engine to every other within rounding, on the same engine to the last bit."""

import pytest

from tests import portability
from tests.engines.saved import configuration
from tests.files import write_json
from tests.processes import run_ranks, warm

PAIRS = [
    ("zero3@2", "horovod@2"),
    ("horovod@2", "zero3+cpu@2"),
    ("zero3+cpu@2", "zero2@2"),
    ("zero2@2", "single@1"),
    ("single@1", "zero1@2"),
    ("zero1@2", "fsdp@2"),
    ("fsdp@2", "zero3@2"),
    ("zero2@2", "pipeline@2"),
    ("pipeline@2", "ddp@2"),
    ("ddp@2", "zero3@1"),
    ("zero3+background@2", "fsdp@3"),
    ("fsdp@2", "zero3@1"),
    ("mixtral experts+zero3@2", "mixtral ddp@3"),
    ("mixtral ddp@3", "mixtral experts+zero0@2"),
]
"""Every setup saves once or goes on once, most both; ``make portability`` tries all pairs."""
LONG_PAIRS = [
    ("zero3@1", "ddp@2"),
    ("pipeline@2", "single@1"),
    ("mixtral experts+zero0@2", "mixtral experts+zero2@4"),
    ("llama sequence+zero1@2", "llama pipeline@2"),
    ("llama pipeline@2", "llama sequence+zero3@4"),
]

NOISE = 2e-5
"""Measured over the whole matrix: at most 4e-7. Sums in another order, 20 steps on; here 10."""


def also_long(names, long):
    """The names as parameters, of which ``make test`` leaves some out."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("portable")


@pytest.mark.parametrize("pair", also_long(map("-to-".join, PAIRS + LONG_PAIRS), [*map("-to-".join, LONG_PAIRS)]))
def test_any_engine_goes_on_where_any_other_stopped(pair, runs):
    saved, then = pair.split("-to-")
    assert portability.difference(saved, then, runs) < NOISE


@pytest.mark.parametrize(
    "setup",
    also_long(
        ["zero3@2", "zero3+background@2", "horovod@2", "fsdp@2", "single@1", "ddp@3"], ["zero3@2", "single@1", "ddp@3"]
    ),
)
def test_the_same_engine_goes_on_to_the_last_bit(setup, runs):
    assert portability.difference(setup, setup, runs) == 0.0


@pytest.mark.parametrize("engine", also_long(["horovod", "ddp"], ["ddp"]))
def test_several_buckets_on_three_ranks_go_on_to_the_last_bit(engine, tmp_path, monkeypatch):
    """From three ranks on, the order of a sum depends on where a gradient lies in the message: the same in every run."""
    deep = portability.Setup(engine, 3, ("dsframe.task.layers=6", "dsframe.task.width=128"))
    monkeypatch.setitem(portability.SETUPS, "deep", deep)
    assert portability.difference("deep", "deep", tmp_path) == 0.0


def test_dropout_goes_on_to_the_last_bit(tmp_path):
    config = configuration("ddp", {}, 19)
    config["dsframe"] |= {"steps": 20, "log_every_steps": 1, "checkpoints": {"every_steps": 7}}
    write_json(tmp_path / "config.json", config)
    arguments = ["-m", "dsframe.train", "--config", "config.json", "--run-dir"]
    run_ranks(warm(2, [*arguments, "whole"]), timeout_seconds=100, cwd=tmp_path).check()
    saved = str(tmp_path / "whole" / "checkpoints" / "step-00000014")
    run_ranks(warm(2, [*arguments, "rest", "--resume", saved]), timeout_seconds=100, cwd=tmp_path).check()
    whole, rest = portability.losses(tmp_path / "whole"), portability.losses(tmp_path / "rest")
    assert list(rest) == list(range(15, 21))
    assert all(whole[step] == loss for step, loss in rest.items())

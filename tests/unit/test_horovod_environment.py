"""What Horovod finds in the environment when it starts, and that no start is let through with which it would crash."""

import os
from unittest import mock

import pytest
import torch

from dsframe.engines.horovod import environment
from dsframe.engines.horovod.environment import APART, ROUNDS, THRESHOLD, TUNES, note_start, pace, settle_environment
from dsframe.errors import EngineError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process in which Horovod has never started, with nothing in its environment."""
    monkeypatch.setattr(environment, "_started", {})
    with mock.patch.dict(os.environ):
        give({})
        yield


def give(variables):
    for name in (THRESHOLD, ROUNDS, APART, TUNES):
        os.environ.pop(name, None)
    os.environ.update(variables)


def told():
    return {name: os.environ[name] for name in (THRESHOLD, ROUNDS, APART, TUNES) if name in os.environ}


def start():
    bucket_bytes = settle_environment(CPU)
    note_start(running=False)
    return bucket_bytes


def test_a_threshold_of_the_environment_cuts_buckets_and_never_reaches_horovod():
    """Its second start in a process would crash where threshold and cycle time are both fixed."""
    for _ in range(2):
        give({THRESHOLD: "4096", ROUNDS: "1"})
        assert start() == 4096
        assert told() == {APART: "1", ROUNDS: "1"}
    give({})
    assert start() is None
    assert told() == {APART: "1", ROUNDS: "5.0"}


def test_autotuning_is_refused():
    give({TUNES: "1"})
    with pytest.raises(EngineError, match="leave out horovodrun's --autotune"):
        start()


def test_over_mpi_it_starts_once():
    start()
    settle_environment(CPU)
    note_start(running=True)
    give({ROUNDS: "1"})
    settle_environment(CPU)
    assert pace() == ", a round every 1 ms"
    with pytest.raises(EngineError, match="HOROVOD_CYCLE_TIME cannot change; train in a new process"):
        note_start(running=True)


def test_on_gpus_buckets_are_handed_over_without_waiting(monkeypatch):
    monkeypatch.delenv(environment.ASYNC_COMPLETION, raising=False)
    settle_environment(CPU)
    assert environment.ASYNC_COMPLETION not in os.environ
    settle_environment(torch.device("cuda", 0))
    assert os.environ[environment.ASYNC_COMPLETION] == "1"
    monkeypatch.setenv(environment.ASYNC_COMPLETION, "0")
    settle_environment(torch.device("cuda", 0))
    assert os.environ[environment.ASYNC_COMPLETION] == "0", "what the user has set stays"

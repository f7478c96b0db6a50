"""What Horovod finds in the environment when it starts, and that no start is let through with which it would crash."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import product
from unittest import mock

import pytest
import torch

from dsframe.config.schema.settings import Horovod
from dsframe.engines import environment_scope
from dsframe.engines.horovod import environment
from dsframe.engines.horovod.environment import APART, ROUNDS, THRESHOLD, TUNES, note_start, pace, settle_environment
from dsframe.errors import EngineError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which Horovod has never started, with nothing in its environment."""
    monkeypatch.setattr(environment_scope, "_ours", {})
    monkeypatch.setattr(environment, "_started", {})
    monkeypatch.setattr(environment, "_fixed", set())
    with mock.patch.dict(os.environ):
        give({})
        yield


def give(variables: Mapping[str, str]) -> None:
    for name in (THRESHOLD, ROUNDS, APART, TUNES):
        os.environ.pop(name, None)
    os.environ.update(variables)


def told() -> dict[str, str]:
    return {name: os.environ[name] for name in (THRESHOLD, ROUNDS, APART, TUNES) if name in os.environ}


def crashes(fixed: set[str]) -> bool:
    """A start of Horovod 0.28.1, as ``operations.cc`` has it: a default, which needs something that is not fixed yet
    (``parameter_manager.cc``: BayesianParameter::SetValue), then what the environment fixes, twice."""
    for name in (THRESHOLD, ROUNDS):
        if fixed == {THRESHOLD, ROUNDS}:
            return True
        fixed |= {name} & os.environ.keys()
    return False


def start(file: Horovod, device: torch.device = CPU) -> float | None:
    bucket_bytes = settle_environment(file, device, running=False)
    note_start(running=False)
    return bucket_bytes


FILES = [
    Horovod(fusion_threshold_bytes=threshold, cycle_time_milliseconds=rounds)
    for threshold, rounds in product((None, 1024), (None, 2.5))
]
VARIABLES: list[dict[str, str]] = [{}, {THRESHOLD: "4096"}, {ROUNDS: "1"}, {THRESHOLD: "4096", ROUNDS: "1"}]


def refused(file: Horovod, device: torch.device = CPU) -> bool:
    try:
        start(file, device)
    except EngineError as error:
        return "unset HOROVOD_FUSION_THRESHOLD" in str(error)
    return False


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_start_that_would_crash_is_refused_and_no_other(device: str) -> None:
    ends = set()
    for trainings in product(product(FILES[::3], VARIABLES), repeat=3):
        fixed: set[str] = set()
        environment._started.clear()
        environment._fixed.clear()
        for number, (file, variables) in enumerate(trainings):
            environment_scope.take_back()
            give(variables)
            said = refused(file, torch.device(device))
            assert crashes(fixed) == said, trainings
            if said:
                ends.add(number)
                break
    assert ends == {1, 2}


def test_what_the_file_says_of_buckets_fixes_nothing() -> None:
    for bytes_each in (1024, 2048, 1024):
        assert start(Horovod(fusion_threshold_bytes=bytes_each, cycle_time_milliseconds=2)) == bytes_each
        assert told() == {APART: "1", ROUNDS: "2.0"}
        assert pace() == ", a round every 2 ms"


def test_horovod_fuses_what_it_tunes_and_the_parameters_of_adasum() -> None:
    for file in (Horovod(autotune=True), Horovod(op="adasum")):
        file = file.model_copy(update={"fusion_threshold_bytes": 1024})
        assert settle_environment(file, CPU, running=False) == 1024
        assert os.environ[THRESHOLD] == "1024"
        assert {APART, ROUNDS} & told().keys() == set()
    assert settle_environment(Horovod(op="adasum"), CPU, running=False) is None
    assert told() == {ROUNDS: "5.0"}


def test_horovod_tunes_itself_once_in_a_process() -> None:
    start(Horovod(autotune=True))
    assert pace() == ", autotuned"
    with pytest.raises(EngineError, match="cannot autotune in a process that starts it more than once"):
        start(Horovod())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nor_does_it_after_a_training_that_was_not_tuned(device: str) -> None:
    start(Horovod(), device=torch.device(device))
    with pytest.raises(EngineError, match=r"remove horovod\.autotune \(HOROVOD_AUTOTUNE\), or train in a new process"):
        start(Horovod(autotune=True), device=torch.device(device))


def test_over_mpi_it_starts_once() -> None:
    start(Horovod(fusion_threshold_bytes=1024))
    settle_environment(Horovod(fusion_threshold_bytes=2048), CPU, running=True)
    note_start(running=True)
    settle_environment(Horovod(cycle_time_milliseconds=1), CPU, running=True)
    with pytest.raises(EngineError, match="HOROVOD_CYCLE_TIME cannot change; train in a new process"):
        note_start(running=True)


def test_on_gpus_buckets_are_handed_over_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.ASYNC_COMPLETION, raising=False)
    settle_environment(Horovod(), CPU, running=False)
    assert environment.ASYNC_COMPLETION not in os.environ
    settle_environment(Horovod(), torch.device("cuda", 0), running=False)
    assert os.environ[environment.ASYNC_COMPLETION] == "1"
    monkeypatch.setenv(environment.ASYNC_COMPLETION, "0")
    settle_environment(Horovod(), torch.device("cuda", 0), running=False)
    assert os.environ[environment.ASYNC_COMPLETION] == "0", "what the user has set stays"

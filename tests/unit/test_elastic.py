"""What a file must say to be trained on a changing number of processes, and how its batch is shared out then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dsframe import engines, job, run
from dsframe.cluster.world import World, read
from dsframe.config import load
from dsframe.config.resolve import elastic
from dsframe.engines import environment_scope
from dsframe.errors import ConfigError, EngineError, Problem
from tests.engines.odd_task import Odd


def found(smallest: int = 1, **keys: object) -> str:
    return "\n".join(map(str, elastic.problems(load({"optimizer": {"type": "SGD"}, **keys}), smallest)))


def test_the_batch_is_shared_by_as_many_as_can() -> None:
    config = load({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2})
    sizes = {processes: elastic.batch(config, processes) for processes in range(1, 8)}
    assert [one.data_parallel_size for one in sizes.values()] == [1, 2, 3, 3, 3, 6, 6]
    assert {one.train_batch_size for one in sizes.values()} == {12}
    assert elastic.said(sizes[3], 3) == []
    assert (
        "5 processes cannot divide a batch of 12: 3 train, 2 stay in step but contribute no gradients"
        in elastic.said(sizes[5], 5)[0]
    )
    assert found(train_batch_size=12) == ""


def test_what_would_change_with_the_number_of_processes_is_refused() -> None:
    assert "train_batch_size: is required in elastic runs: the batch would change" in found(
        train_micro_batch_size_per_gpu=4
    )
    assert "a sum of gradients changes" in found(train_batch_size=8, gradient_allreduce_op="sum")
    assert "adasum needs MPI" in found(train_batch_size=8, dsframe={"horovod": {"op": "adasum"}})
    assert "Horovod's autotuning crashes" in found(train_batch_size=8, dsframe={"horovod": {"autotune": True}})
    both = {"fusion_threshold_bytes": 1024, "cycle_time_milliseconds": 5}
    assert found(train_batch_size=8, dsframe={"horovod": both}) == ""  # Horovod hears of one: buckets are cut here
    fixed = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert found(2, **fixed) == ""
    assert "8 != 2 (micro) x 2 (accumulation)" in found(1, **fixed)


def test_a_worker_knows_that_it_is_in_such_a_run() -> None:
    variables = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
    assert not read(variables).elastic
    assert read({**variables, "HOROVOD_ELASTIC": "1"}).elastic


def test_it_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 2, 0, 1, 0, "horovodrun", elastic=True)
    with pytest.raises(EngineError, match='engine "ddp" cannot train on while processes come and go: choose "horovod"'):
        run.execute(load({"train_batch_size": 8, "dsframe": {"engine": "ddp"}}), world=world)
    with pytest.raises(ConfigError, match="train_batch_size: is required"):
        run.execute(load({"train_micro_batch_size_per_gpu": 8, "dsframe": {"engine": "horovod"}}), world=world)
    with pytest.raises(EngineError, match="cannot train on"):
        engines.elastic("deepspeed")
    # What launch accepts with --min-np 2 its workers accept too: 12 = 2 x 3 on two processes, and no such batch on one.
    fixed = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    config = load({**fixed, "optimizer": {"type": "SGD", "params": {}}, "dsframe": {"engine": "horovod"}})
    assert elastic.problems(config, 2) == [] != elastic.problems(config)
    (caution,) = elastic.cautions(config, 2)
    assert "1 process cannot divide this file's batch" in caution
    assert "with --min-np 2" in caution
    assert elastic.cautions(load({"train_batch_size": 12}), 4) == []
    monkeypatch.setattr(
        "dsframe.run.loggers.missing", lambda config: [Problem("error", "x", "nothing else is wrong", "", code="value")]
    )
    with pytest.raises(ConfigError) as refused:
        run.execute(config, world=world)
    assert [problem.message for problem in refused.value.problems] == ["nothing else is wrong"]


def test_what_a_file_puts_into_the_environment_is_no_word_of_the_environments_in_the_next_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROUNDS", "7")
    for name in ("THRESHOLD", "TUNE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def now() -> list[str | None]:
        return [os.environ.get(name) for name in ("THRESHOLD", "ROUNDS", "TUNE")]

    environment_scope.take_back()
    assert environment_scope.number("THRESHOLD", 1024, None) == 1024
    assert environment_scope.number("ROUNDS", 5, 1) == 5
    environment_scope.put("TUNE", "1")
    environment_scope.put("TUNE", "2")
    assert now() == ["1024", "5", "2"]
    environment_scope.take_back()
    assert now() == [None, "7", None]
    assert environment_scope.number("THRESHOLD", None, None) is None
    assert environment_scope.number("ROUNDS", None, 1) == 7
    environment_scope.put("TUNE", "1")
    monkeypatch.setenv("TUNE", "3")  # somebody else's
    environment_scope.take_back()
    assert now() == [None, "7", "3"]


def test_there_is_a_commit_before_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A task may give the next engine the module that this one has trained, when processes go before the first is due."""

    class Kept:
        last = None
        updates: list[tuple[int, int]] = []  # noqa: RUF012

        def due(self, step: int) -> bool:
            return step == 2

        def keep(self, engine: Any, start: Any) -> None:
            self.last = start
            self.updates.append((start.step, engine.state().updates))
            assert start.in_place

    kept, train = Kept(), job.train
    monkeypatch.setattr(job, "train", lambda given, world, _: train(given, world, kept))
    section = {"engine": "single", "steps": 3, "run_dir": str(tmp_path)}
    file = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "dsframe": section}
    run.execute(load(file), task=Odd(), quiet=True)
    assert kept.updates == [(0, 0), (2, 2)]

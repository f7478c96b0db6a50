"""Scripts that were moved to dsframe are the same training: beside the plain loop on one process, and on two ranks."""

import pytest

import dsframe
from tests.engines.ports import BATCH, CASES, STEPS, Carried, moved, plain
from tests.files import read_json
from tests.processes import run_ranks, warm

BOUND = 1e-5


def farthest(one, other):
    """In terms of the number where that is above 1: sums are."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(one, other, strict=True))


def off(one, other):
    """Losses, and evaluations if there are any."""
    assert len(one["losses"]) == len(other["losses"]) == STEPS
    assert one["evaluation"].keys() == other["evaluation"].keys()
    figures = [[*found["losses"], *found["evaluation"].values()] for found in (one, other)]
    return farthest(*figures)


@pytest.mark.parametrize("name", CASES)
def test_one_process_is_the_plain_loop(name, tmp_path):
    losses = plain(CASES[name])
    assert farthest(moved(name, "single", tmp_path)["losses"], losses) <= CASES[name].bound
    assert losses[-1] != losses[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What two ranks are measured by."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: moved(name, "single", folder, by_sample=case.draws) for name, case in CASES.items() if not case.alone}


def test_what_a_model_carries_is_in_checkpoints(tmp_path, monkeypatch):
    """A run that goes on, from the hidden state of the step that was saved."""
    monkeypatch.chdir(tmp_path)
    file = {"train_batch_size": BATCH, **CASES["carried"].file}
    settings = {"engine": "single", "order": "sequential", "run_dir": "run"}
    whole = dsframe.fit(Carried(), file | {"dsframe": settings | {"steps": 20, "run_dir": "whole"}})
    dsframe.fit(Carried(), file | {"dsframe": settings | {"steps": 9}})
    parts = dsframe.fit(Carried(), file | {"dsframe": settings | {"steps": 20}}, resume="auto")
    assert parts.loss == whole.loss


@pytest.mark.parametrize("engine", ["ddp", "deepspeed", "fsdp", "horovod"])
def test_two_ranks_are_one_process(engine, alone, tmp_path):
    command = ["-m", "tests.engines.ports", engine, str(tmp_path)]
    run_ranks(warm(2, command), cwd=tmp_path, timeout_seconds=300).check()
    found = read_json(tmp_path / f"{engine}.json")
    distances = {name: off(found[name], alone[name]) for name in found}
    assert found.keys() == {name for name, case in CASES.items() if case.runs_on(engine)}
    assert {name: distance for name, distance in distances.items() if distance > BOUND} == {}, distances

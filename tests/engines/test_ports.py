"""Scripts that were moved to dsframe are the same training: beside the plain loop on one process, and on two ranks."""

import pytest

import dsframe
from tests.engines.ports import BATCH, CASES, Carried, moved, plain

BOUND = 1e-5


def farthest(one, other):
    """In terms of the number where that is above 1: sums are."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_one_process_is_the_plain_loop(name, tmp_path):
    losses = plain(CASES[name])
    assert farthest(moved(name, "single", tmp_path), losses) <= CASES[name].bound
    assert losses[-1] != losses[0]


def test_what_a_model_carries_is_in_checkpoints(tmp_path, monkeypatch):
    """A run that goes on, from the hidden state of the step that was saved."""
    monkeypatch.chdir(tmp_path)
    file = {"train_batch_size": BATCH, **CASES["carried"].file}
    settings = {"engine": "single", "order": "sequential", "run_dir": "run"}
    whole = dsframe.fit(Carried(), file | {"dsframe": settings | {"steps": 20, "run_dir": "whole"}})
    dsframe.fit(Carried(), file | {"dsframe": settings | {"steps": 9}})
    parts = dsframe.fit(Carried(), file | {"dsframe": settings | {"steps": 20}}, resume="auto")
    assert parts.loss == whole.loss


@pytest.fixture(scope="module", params=[name for name, case in CASES.items() if not case.alone])
def alone(request, tmp_path_factory):
    """A script, and what two ranks are measured by."""
    name = request.param
    return name, moved(name, "single", tmp_path_factory.mktemp("alone"), by_sample=CASES[name].draws)


@pytest.mark.parametrize("engine", ["ddp", "deepspeed", "fsdp", "horovod"])
def test_two_ranks_are_one_process(engine, alone, tmp_path):
    name, losses = alone
    assert farthest(moved(name, engine, tmp_path, 2, by_sample=CASES[name].draws), losses) <= BOUND

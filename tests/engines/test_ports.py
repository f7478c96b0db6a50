"""Scripts that were moved to dsframe are the same training: beside the plain loop on one process, and on two ranks."""

import pytest

from tests.engines.ports import CASES, moved, plain

BOUND = 1e-5


def farthest(one, other):
    """In terms of the number where that is above 1: sums are."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_one_process_is_the_plain_loop(name, tmp_path):
    losses = plain(CASES[name])
    assert farthest(moved(name, "single", tmp_path), losses) <= CASES[name].bound
    assert losses[-1] != losses[0]


@pytest.fixture(scope="module", params=CASES)
def alone(request, tmp_path_factory):
    """A script, and what two ranks are measured by."""
    name = request.param
    return name, moved(name, "single", tmp_path_factory.mktemp("alone"), by_sample=CASES[name].draws)


@pytest.mark.parametrize("engine", ["ddp", "deepspeed", "fsdp", "horovod"])
def test_two_ranks_are_one_process(engine, alone, tmp_path):
    name, losses = alone
    assert farthest(moved(name, engine, tmp_path, 2, by_sample=CASES[name].draws), losses) <= BOUND

"""Memory falls as the ZeRO paper says, and bytes sent are theory's: the measurements of tests/footprint.py, two processes."""

from __future__ import annotations

import pytest

from tests.footprint import Measured, measure

NAMES = ("ddp", "zero1", "zero2", "zero3", "fsdp")


@pytest.fixture(scope="module")
def measured() -> dict[str, Measured]:
    """One job for all of them."""
    return {one.name: one for one in measure(NAMES, 2)}


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_holds_what_the_formula_says(measured: dict[str, Measured], name: str) -> None:
    one = measured[name]
    cost = one.case.cost(2)
    assert one.held("parameters") == pytest.approx(cost.parameter, rel=0.05)
    assert one.held("gradients") == pytest.approx(cost.gradient, rel=0.1)  # the buckets on top
    assert one.held("optimizer") == pytest.approx(cost.optimizer, rel=0.05)
    assert one.total == pytest.approx(cost.total, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_sends_what_theory_says(measured: dict[str, Measured], name: str) -> None:
    assert measured[name].sent == pytest.approx(measured[name].theory, rel=0.03)
    assert measured[name].received == pytest.approx(measured[name].sent)


def test_memory_falls_from_stage_to_stage(measured: dict[str, Measured]) -> None:
    totals = [measured[name].total for name in NAMES]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] < 0.6 * totals[0]


def test_sharded_parameters_are_sent_half_as_often_again(measured: dict[str, Measured]) -> None:
    assert measured["zero3"].sent == pytest.approx(1.5 * measured["ddp"].sent, rel=0.03)
    assert measured["fsdp"].sent == pytest.approx(1.5 * measured["ddp"].sent, rel=0.03)

"""Memory falls as the ZeRO paper says, and bytes sent are theory's: the measurements of tests/footprint.py, two processes."""

from __future__ import annotations

import pytest

from dsframe import tasks
from dsframe.config import load
from dsframe.tools.plan.device import unlimited
from dsframe.tools.plan.predict import predict
from dsframe.tools.plan.trace import traced
from tests import footprint
from tests.footprint import OFF, Measured, measure

NAMES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
CUT = ("pipeline", "tensor parallel")


@pytest.fixture(scope="module")
def measured() -> dict[str, Measured]:
    """One job for all that hold a whole model between them, and one for each way to cut it."""
    return {one.name: one for one in measure((*NAMES, *CUT), 2)}


@pytest.mark.parametrize("name", [*NAMES, *CUT])
def test_a_rank_holds_what_the_formula_says(measured: dict[str, Measured], name: str) -> None:
    one = measured[name]
    cost = one.case.cost(2)
    assert one.held("parameters") == pytest.approx(cost.parameter, rel=0.05)
    assert one.held("gradients") == pytest.approx(cost.gradient, rel=0.1)  # the buckets on top
    assert one.held("optimizer") == pytest.approx(cost.optimizer, rel=0.05)
    assert one.total == pytest.approx(cost.total, rel=OFF)


@pytest.mark.parametrize("name", [*NAMES, *CUT])
def test_a_rank_sends_what_theory_says(measured: dict[str, Measured], name: str) -> None:
    assert measured[name].sent == pytest.approx(measured[name].theory, rel=0.03)
    assert measured[name].received == pytest.approx(measured[name].sent)


@pytest.mark.parametrize("name", [*NAMES, *CUT])
def test_the_plan_says_what_is_measured(measured: dict[str, Measured], name: str) -> None:
    one = measured[name]
    config = load(one.case.file(2))
    model = traced(config, tasks.build(config.settings.task, 0))
    plan = predict(config, one.case.engine, model, unlimited(on_cpu=True), 2)
    assert plan.memory.states / model.parameters == pytest.approx(one.total, rel=OFF)
    assert sum(plan.sent.values()) == pytest.approx(one.sent, rel=0.04)


def test_memory_falls_from_stage_to_stage(measured: dict[str, Measured]) -> None:
    totals = [measured[name].total for name in NAMES]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] < 0.6 * totals[0]


def test_sharded_parameters_are_sent_half_as_often_again(measured: dict[str, Measured]) -> None:
    assert measured["zero3"].sent == pytest.approx(1.5 * measured["ddp"].sent, rel=0.03)
    assert measured["fsdp"].sent == pytest.approx(1.5 * measured["ddp"].sent, rel=0.03)


@pytest.mark.parametrize(
    ("name", "ranks", "gradients", "code"),
    [("ddp", 2, 4, 0), ("ddp", 2, 5, 1), ("zero3", 2, 4, 1), ("ddp, bf16 sent", 4, 6, 0), ("ddp, bf16 sent", 2, 6, 1)],
)
def test_the_command_fails_where_memory_misses_its_formula(
    name: str,
    ranks: int,
    gradients: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = {
        "parameters": 4,
        "gradients": gradients,
        "optimizer": 8,
        "at_update": 16,
        "model": 1,
        "sent": 1,
        "received": 1,
    }
    monkeypatch.setattr(footprint, "measure", lambda names, *_: [Measured(names[0], ranks, 1, [figures])])
    monkeypatch.setattr("sys.argv", ["footprint", name, "--processes", f"{ranks}", "--accumulation", "1"])
    assert footprint.main() == code
    assert (f"{name}, {ranks} processes: " in capsys.readouterr().out) == bool(code)

"""What is said instead of a library's error, and by what a write is seen."""

from __future__ import annotations

import torch

from dsframe.errors import EngineError
from dsframe.model.weight_watch import WeightWatch, _sums


class Engine:
    """One that knows an error."""

    plan = None
    description = "PyTorch FSDP"
    explains = {"mixed DTensor": "{} has not gathered a weight"}  # noqa: RUF012


def test_an_engine_that_has_said_why_is_not_explained(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(WeightWatch, "__init__", lambda self: None)
    watch = WeightWatch()
    watch._engine, watch._parameters = engine, {}
    assert "has not gathered a weight" in str(watch.explained(RuntimeError("got mixed DTensor")))
    assert watch.explained(EngineError("the optimizer fails: got mixed DTensor")) is None


def test_a_write_to_the_imaginary_part_is_seen():
    weight = torch.ones(2, dtype=torch.complex64)
    assert _sums({"a": weight}) != _sums({"a": weight + 1j})


def test_numbers_that_trade_places_are_seen():
    weight = torch.arange(6.0)
    assert _sums({"a": weight}) != _sums({"a": weight.flip(0)})

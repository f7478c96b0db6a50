"""A loss that is a sum over rows trains as the sum over the global batch where the task says so, and is an error where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dsframe
from dsframe.data import TensorSource
from dsframe.errors import TaskError
from dsframe.training.loss_kind import _kind_of

Loss = Callable[[Any, Any], Any]


class Line(dsframe.Task):
    def __init__(self, loss: Loss, **says: Any) -> None:
        self._loss = loss
        for name, value in says.items():
            setattr(self, name, value)

    def model(self) -> nn.Module:
        return nn.Linear(3, 4)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._loss(outputs, targets)

    def train_data(self) -> Any:
        numbers = torch.Generator().manual_seed(0)
        return TensorSource(torch.randn(32, 3, generator=numbers), torch.randn(32, 4, generator=numbers))

    def eval_data(self) -> Any:
        return self.train_data()


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets, reduction="sum")


def by_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.cdist(outputs, outputs).mean()


def drawing(outputs: Tensor, targets: Tensor) -> Tensor:
    return mean(outputs + 3 * torch.randn_like(outputs), targets)


KINDS: dict[str, tuple[Loss, str]] = {
    "mean": (mean, "mean"),
    "mean and a constant": (lambda o, t: mean(o, t) + 3, "mean"),
    "cross entropy": (lambda o, t: functional.cross_entropy(o, t.argmax(1)), "mean"),
    "its own": (lambda o, t: o.mean() * 0 + 2.0, "mean"),
    "sum": (total, "sum"),
    "sum by a constant": (lambda o, t: total(o, t) / 8, "sum"),
    "batch": (by_batch, "neither"),
    "sum and a constant": (lambda o, t: total(o, t) + 300, "neither"),
    "padding without loss_weight": (
        lambda o, t: functional.cross_entropy(o, t.argmax(1).masked_fill(t[:, 0] > 0, -100)),
        "neither",
    ),
    "zero": (lambda o, t: o.sum() * 0, ""),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_loss(name: str) -> None:
    numbers = torch.Generator().manual_seed(1)
    rows = [torch.randn(9, 4, generator=numbers) for _ in range(2)]
    loss, kind = KINDS[name]
    assert _kind_of(Line(loss), *rows) == kind
    assert _kind_of(Line(loss), rows[0][:1], rows[1][:1]) == ""


def file(accumulation: int, steps: int = 6) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "dsframe": {"engine": "single", "steps": steps, "checkpoints": {"at_end": False}},
    }


@pytest.fixture(autouse=True)
def _here(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_sum_that_nobody_named_is_an_error_where_it_matters(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        TaskError, match=r"Line\.loss gives a sum .* gradients would be 1/2 of those of the whole batch"
    ):
        dsframe.fit(Line(total), file(2))
    assert dsframe.fit(Line(total), file(1)).steps == 6
    assert 'with more ranks or accumulation the task needs loss_is = "sum"' in capsys.readouterr().err


def test_a_sum_is_of_the_global_batch() -> None:
    one, two, four = (dsframe.fit(Line(total, loss_is="sum"), file(count)) for count in (1, 2, 4))
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert four.loss == pytest.approx(one.loss, rel=1e-6)
    assert one.loss == dsframe.fit(Line(total), file(1)).loss
    assert one.metrics["loss"] == pytest.approx(two.metrics["loss"], rel=1e-6)
    by_hand = Line(total).train_data()._data
    assert one.metrics["loss"] < float(total(torch.zeros(32, 4), by_hand[1])) / 32


def test_neither_is_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = "neither a mean nor a sum over rows, so the training depends on the micro batch size"
    dsframe.fit(Line(by_batch), file(2, steps=2))
    assert capsys.readouterr().err.count(said) == 1
    dsframe.fit(Line(by_batch, batch_dependent=True), file(2, steps=2))
    assert said not in capsys.readouterr().err


def test_what_a_task_says_has_to_be_true() -> None:
    with pytest.raises(TaskError, match="gives a mean over the rows of a micro-batch, but the task says"):
        dsframe.fit(Line(mean, loss_is="sum"), file(1))
    with pytest.raises(TaskError, match='loss_is is \'total\'; write "mean" or "sum"'):
        dsframe.fit(Line(mean, loss_is="total"), file(1))


def test_the_look_draws_nothing_of_the_trainings() -> None:
    """One that draws in its loss goes on as if nobody had looked."""
    found = dsframe.fit(Line(drawing), file(1, steps=3)).loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsframe.training.loss_kind.LossTrial.watched", lambda _, batch: batch)
        assert dsframe.fit(Line(drawing), file(1, steps=3)).loss == found

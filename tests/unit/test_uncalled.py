"""Methods with another name than the one that is called are named at the start."""

from __future__ import annotations

from typing import Any

import pytest

import dsframe
from dsframe.guard.uncalled import lines


class Misspelled(dsframe.Task):
    collate_fn = staticmethod(list)
    helper: Any = None

    def trian_data(self) -> None: ...

    def evaluate(self) -> None: ...

    def training_step(self) -> None: ...

    def losses_of(self) -> None: ...

    def models_(self) -> None: ...

    def _metric(self) -> None: ...


class Lower(Misspelled):
    def metrics(self, outputs: Any, targets: Any) -> Any:
        return [self.training_step() for _ in range(1)]


class Mixin:
    def loss(self, outputs: Any, targets: Any) -> Any:
        return self.training_step()  # type: ignore[attr-defined]


class Mixed(Mixin, dsframe.Task):
    def training_step(self) -> None: ...


class Listener(dsframe.Hooks):
    def on_train_end(self) -> None: ...

    def on_step(self, run: Any) -> None: ...


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (
            Misspelled,
            {"collate_fn": "collate", "trian_data": "train_data", "training_step": "loss", "models_": "models"},
        ),
        (Lower, {"collate_fn": "collate", "trian_data": "train_data", "models_": "models"}),
        (Mixed, {}),
        (Listener, {"on_train_end": "on_end"}),
    ],
)
def test_methods_that_nobody_calls(user: type, said: dict[str, str]) -> None:
    expected = {
        f'warning: {user.__name__}.{name} is not called by dsframe; did you mean "{meant}"?'
        for name, meant in said.items()
    }
    assert set(lines(user)) == expected

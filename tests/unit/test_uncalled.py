"""Methods with another name than the one that is called are named at the start."""

from __future__ import annotations

import pytest

import dsframe
from dsframe.guard.uncalled import lines


class Misspelled(dsframe.Task):
    collate_fn = staticmethod(list)
    helper = None

    def trian_data(self): ...

    def evaluate(self): ...

    def training_step(self): ...

    def losses_of(self): ...

    def models_(self): ...

    def _metric(self): ...


class Lower(Misspelled):
    def metrics(self, outputs, targets):
        return [self.training_step() for _ in range(1)]


class Mixin:
    def loss(self, outputs, targets):
        return self.training_step()


class Mixed(Mixin, dsframe.Task):
    def training_step(self): ...


class Listener(dsframe.Hooks):
    def on_train_end(self): ...

    def on_step(self, run): ...


class Both(dsframe.Task, dsframe.Hooks):
    def on_step(self, run): ...


class Hooked(dsframe.Task):
    def on_train_end(self): ...

    def on_step(self, run): ...

    def loss(self, outputs, targets):
        return self.on_log()

    def on_log(self): ...


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (
            Misspelled,
            {"collate_fn": "collate", "trian_data": "train_data", "training_step": "loss", "models_": "models"},
        ),
        (Lower, {"collate_fn": "collate", "trian_data": "train_data", "models_": "models"}),
        (Mixed, {}),
        (Both, {}),
        (Listener, {"on_train_end": "on_end"}),
    ],
)
def test_methods_that_nobody_calls(user, said):
    expected = {
        f'warning: {user.__name__}.{name} is not called by dsframe; did you mean "{meant}"?'
        for name, meant in said.items()
    }
    assert set(lines(user)) == expected


def test_methods_of_hooks_in_a_task():
    assert [line.partition(" belongs")[0] for line in lines(Hooked)] == [
        "warning: Hooked.on_step is not called by dsframe: on_step",
        "warning: Hooked.on_train_end is not called by dsframe: on_end",
    ]

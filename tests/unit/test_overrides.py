"""A model may override methods of nn.Module, as long as torch can call them, and they leave nothing out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsframe
from dsframe.errors import TaskError
from dsframe.model import overrides
from tests.files import ds_config
from tests.lines import Line


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


class NoArguments(Parts):
    def parameters(self):
        return super().parameters()


class NeedsMode(Parts):
    def train(self, mode):
        return super().train(mode)


class Keeps(Parts):
    def train(self, mode=True):
        return super().train(False)

    def parameters(self, *args, **kwargs):
        return super().parameters(*args, **kwargs)


class OtherOrder(Parts):
    def parameters(self, recurse=True):
        return reversed(list(super().parameters(recurse)))


class NamesNothing(Parts):
    def named_parameters(self, *args, **kwargs):
        return iter([])


class OnePart(Parts):
    def modules(self):
        return iter([self.first])


class NoChildren(Parts):
    def children(self):
        return iter([])


class AllModules(Parts):
    def modules(self):
        return super().modules()


class Knows(Parts):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None


class RaisesKeyError(Parts):
    """Such as one that looks into a dict of its own."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return {}[name]


REFUSED = {
    Knows: r"Knows\.__getattr__ must raise AttributeError for a name that it does not know",
    RaisesKeyError: r"RaisesKeyError\.__getattr__ must raise AttributeError",
    OtherOrder: r"OtherOrder\.parameters\(\) gives other parameters than the model has, or in another order; remove",
    NoArguments: r"NoArguments\.parameters\(self\) overrides nn\.Module\.parameters, and torch calls it as param",
    NeedsMode: r"NeedsMode\.train\(self, mode\) overrides nn\.Module\.train, and torch calls it as",
    NamesNothing: r"NamesNothing\.parameters\(\) gives other parameters",
    OnePart: r"OnePart\.modules\(\) or children\(\) gives other modules than the model has; remove it",
    NoChildren: r"NoChildren\.modules\(\) or children\(\) gives other modules",
}


@pytest.mark.parametrize("cls", REFUSED)
def test_what_torch_cannot_call_is_named(cls):
    for model in (cls(), nn.Sequential(nn.Linear(2, 2), cls())):
        with pytest.raises(TaskError, match=REFUSED[cls]):
            overrides.refuse(model, "Mine")


@pytest.mark.parametrize("returned", [None, nn.Linear, [nn.Linear(2, 2)]])
def test_what_is_no_module_is_named(returned):
    with pytest.raises(TaskError, match=rf"^T\.model\(\) returned {type(returned).__name__}, not a torch\.nn\.Module$"):
        overrides.refuse(returned, "T")


def test_other_overrides_are_fine():
    overrides.refuse(Keeps(), "Mine")
    overrides.refuse(AllModules(), "Mine")
    overrides.refuse(nn.LSTM(2, 2), "Mine")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_model_that_takes_no_hooks_is_named():
    compiled = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TaskError, match=r"compiled by torch\.jit\.script, which takes no hooks"):
        overrides.refuse(compiled, "Mine")
    overrides.refuse(nn.Sequential(compiled), "Mine")
    overrides.refuse(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), "Mine")


class Exported(Line):
    def model(self):
        return torch.export.export(nn.Linear(1, 1), (torch.zeros(2, 1),)).module()


def test_a_model_that_has_no_mode_for_training_is_named():
    with pytest.raises(TaskError, match=r"train\(\) is not implemented .*; return the module that it was made from"):
        dsframe.fit(Exported(), ds_config(1, "AdamW", 1e-3, engine="single", steps=1))


def test_wrappers_that_spread_a_model_are_named():
    with pytest.raises(TaskError, match="contains a DataParallel, which spreads it over devices or processes itself"):
        overrides.refuse(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), "Mine")

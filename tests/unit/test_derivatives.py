"""Which models and losses need whole weights is read in their code."""

import pytest
import torch
from torch import autograd, nn
from torch.autograd import grad
from torch.func import functional_call

from dsframe import Task
from dsframe.model import derivatives
from tests.engines import foreign_tasks


class Plain(nn.Module):
    def forward(self, inputs):
        with torch.enable_grad():
            return nn.functional.relu(inputs)


class ByName(nn.Module):
    def forward(self, inputs):
        return autograd.grad(inputs.sum(), inputs)[0]


class ByImport(nn.Module):
    @property
    def slopes(self):
        return lambda inputs: grad(inputs.sum(), inputs)[0]


class ByFunction(nn.Module):
    def forward(self, inputs):
        return _penalty(inputs)


class Transformed(nn.Module):
    def forward(self, inputs):
        return torch.func.vmap(torch.square)(inputs)


class Called(nn.Module):
    def forward(self, inputs):
        return functional_call(self, {}, inputs)


class Backward(nn.Module):
    def forward(self, inputs):
        inputs.sum().backward(create_graph=True)
        return inputs


def _penalty(inputs):
    return torch.autograd.grad(inputs.sum(), inputs)[0]


class Loss(Task):
    def loss(self, outputs, targets):
        return _penalty(outputs)


@pytest.mark.parametrize("module", [ByName, ByImport, ByFunction, Transformed, Called, Backward])
def test_derivatives_are_seen_in_code(module):
    assert derivatives.line_of(Task(), nn.Sequential(nn.Linear(1, 1), module())).startswith(__file__)


def test_derivatives_are_seen_in_a_backward_pass():
    shown, hidden = (foreign_tasks.Backwards(f"by a method{more}") for more in (" that shows it", ""))
    assert derivatives.line_of(shown, shown.model()).startswith(foreign_tasks.__file__)
    assert derivatives.line_of(hidden, hidden.model()) == ""


def test_losses_are_looked_at_too():
    assert derivatives.line_of(Loss(), nn.Linear(1, 1)).startswith(__file__)
    assert derivatives.line_of(Task.from_module(Plain, lambda outputs, _: _penalty(outputs), None), Plain())


def test_other_code_has_none():
    assert derivatives.line_of(Task.from_module(Plain, nn.CrossEntropyLoss(), None), nn.Sequential(Plain())) == ""

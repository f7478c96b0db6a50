"""Which models and losses need whole weights is read in their code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, autograd, nn
from torch.autograd import grad
from torch.func import functional_call

from dsframe import Task
from dsframe.model import derivatives
from tests.engines import foreign_tasks


class Plain(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            return nn.functional.relu(inputs)


class ByName(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return autograd.grad(inputs.sum(), inputs)[0]


class ByImport(nn.Module):
    @property
    def slopes(self) -> Any:
        return lambda inputs: grad(inputs.sum(), inputs)[0]


class ByFunction(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return _penalty(inputs)


class Transformed(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.func.vmap(torch.square)(inputs)


class Called(nn.Module):
    def forward(self, inputs: Tensor) -> Any:
        return functional_call(self, {}, inputs)


class Backward(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        inputs.sum().backward(create_graph=True)
        return inputs


def _penalty(inputs: Tensor) -> Tensor:
    return torch.autograd.grad(inputs.sum(), inputs)[0]


class Loss(Task):
    def loss(self, outputs: Any, targets: Any) -> Any:
        return _penalty(outputs)


@pytest.mark.parametrize("module", [ByName, ByImport, ByFunction, Transformed, Called, Backward])
def test_derivatives_are_seen_in_code(module: type[nn.Module]) -> None:
    assert derivatives.line_of(Task(), nn.Sequential(nn.Linear(1, 1), module())).startswith(__file__)


def test_derivatives_are_seen_in_a_backward_pass() -> None:
    shown, hidden = (foreign_tasks.Backwards(f"by a method{more}") for more in (" that shows it", ""))
    assert derivatives.line_of(shown, shown.model()).startswith(foreign_tasks.__file__)
    assert derivatives.line_of(hidden, hidden.model()) == ""


def test_losses_are_looked_at_too() -> None:
    assert derivatives.line_of(Loss(), nn.Linear(1, 1)).startswith(__file__)
    assert derivatives.line_of(Task.from_module(Plain, lambda outputs, _: _penalty(outputs), None), Plain())


def test_other_code_has_none() -> None:
    assert derivatives.line_of(Task.from_module(Plain, nn.CrossEntropyLoss(), None), nn.Sequential(Plain())) == ""

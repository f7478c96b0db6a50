"""Hooks on the gradients of parameters, without an engine."""

import pytest
import torch
from torch import nn

from dsframe.errors import EngineError, TaskError
from dsframe.model import gradient_hooks


def test_hooks_are_called_as_torch_calls_them_and_taken_from_it():
    model, seen = nn.Linear(2, 1), []
    model.weight.register_hook(seen.append)
    model.weight.register_hook(lambda gradient: 2 * gradient)
    hooks, ones = gradient_hooks.find(model), torch.ones(1, 2)
    assert torch.equal(gradient_hooks.call(hooks["weight"], ones), 2 * ones)
    assert seen == [ones]
    gradient_hooks.take(model, hooks)
    assert gradient_hooks.find(model) == {}


def test_hooks_that_would_get_parts_of_a_gradient_are_refused():
    model = nn.Linear(2, 1)
    gradient_hooks.refuse_nonlinear(model, {"weight": [torch.neg]}, "x")
    with pytest.raises(EngineError, match="the hook on the gradient of weight is not linear"):
        gradient_hooks.refuse_nonlinear(model, {"weight": [torch.sign]}, "x")
    model.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(TaskError, match="use register_hook"):
        gradient_hooks.find(model)

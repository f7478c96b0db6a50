"""Layers that can be built one at a time, and the weights they share."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from dsframe import Tied
from dsframe.errors import TaskError
from dsframe.tasks.layers import assemble, make, ready


class Noisy(nn.Module):
    """Draws from NumPy, as some initialisations do."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(np.random.rand(4), dtype=torch.float32))

    def forward(self, inputs):
        return inputs * self.scale


LAYERS = [
    partial(nn.Embedding, 8, 4),
    partial(nn.Linear, 4, 4),
    Noisy,
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    Tied(0, functional.linear),
]


def test_a_layer_by_itself_is_the_layer_in_the_model():
    whole = assemble(LAYERS, seed=3).state_dict()
    for index in (3, 0, 2, 1):  # in any order, whatever was drawn before
        torch.rand(index)
        alone = make(LAYERS[index], index, seed=3).state_dict()
        assert alone
        assert all(torch.equal(whole[f"{index}.{name}"], tensor) for name, tensor in alone.items())
    assert not torch.equal(assemble(LAYERS, seed=4)[1].weight, whole["1.weight"])
    alike = assemble([partial(nn.Linear, 4, 4)] * 2, seed=3)
    assert not torch.equal(alike[0].weight, alike[1].weight)


def test_a_tied_weight_is_one_parameter_of_both_layers():
    model = assemble(LAYERS, seed=0)
    assert model[4].weight is model[0].weight
    assert [name for name, _ in model.named_parameters()] == [
        "0.weight",
        "1.weight",
        "1.bias",
        "2.scale",
        "3.0.weight",
        "3.0.bias",
    ]
    tokens = torch.tensor([[1, 2]])
    scores = model(tokens)
    torch.testing.assert_close(scores, model[:4](tokens) @ model[0].weight.T)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.ReLU, Tied(1, functional.linear)], "layer 1 is tied to layer 1; it has to be an earlier one"),
        (
            [partial(nn.Linear, 2, 2), Tied(0, functional.linear)],
            "whose parameters are weight, bias; make what is shared",
        ),
        (
            [*LAYERS[:1], *[Tied(0, functional.linear), Tied(1, functional.linear)]],
            "layer 2 is tied to layer 1; it has",
        ),
        ([lambda: 3], "layer 0 .* is a int, neither a module nor a function that makes one"),
    ],
)
def test_what_is_no_layer_is_refused(layers, message):
    with pytest.raises(TaskError, match=message):
        assemble(layers, seed=0)
    with pytest.raises(TaskError, match=r"layer 0 of cut\(\) is not a module"):
        ready(LAYERS)

"""How a model is called with a batch, and what a task's loss is to a step."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

from dsframe import Task
from dsframe.data.sample_draws import SampleDraws
from dsframe.errors import TaskError
from dsframe.model.forward import call, loss_of, outputs_of
from dsframe.model.micro_batch import Arguments, MicroBatch
from dsframe.tasks import Sum

PACKED = pack_sequence([torch.ones(1, 2)])
ROWS = torch.ones(4, 1, requires_grad=True)


@pytest.mark.parametrize(
    ("inputs", "reached"),
    [
        ([1, 2], ((1, 2), {})),
        ((1, 2), ((1, 2), {})),
        ({"a": 1}, ((), {"a": 1})),
        (Arguments((1,), {"a": 2}), ((1,), {"a": 2})),
        (PACKED, ((PACKED,), {})),
    ],
)
def test_inputs_reach_the_model_as_arguments(inputs, reached):
    assert call(lambda *args, **kwargs: (args, kwargs), inputs) == reached


@dataclass
class Output:
    scores: Tensor


def test_tensors_in_a_models_own_class_are_found():
    assert tree_leaves(outputs_of(Output, ROWS, None)) == [ROWS]


class Noisy(Task):
    """Draws a number for each row, and returns a term."""

    term = "noise"

    def loss(self, outputs, targets):
        noise = torch.rand(len(outputs), 1)
        return (outputs * noise).mean(), {self.term: Sum(outputs.sum(), 1)}


def loss(weight=1.0, terms=None, size=4):
    """Of all rows, in micro-batches of this size."""
    model = nn.Identity()
    draws, losses = SampleDraws(model, 7, size, torch.device("cpu")), []
    for first in range(0, len(ROWS), size):
        draws.at(0, first)
        outputs = model(ROWS[first : first + size])
        losses.append(
            loss_of(Noisy(), outputs, MicroBatch(None, None, weight, draws=draws), {} if terms is None else terms)
        )
    return float(sum(losses).detach()) / len(losses)


def test_a_loss_draws_for_rows_and_counts_by_its_weight():
    assert loss(size=1) == pytest.approx(loss(), rel=1e-6)
    assert loss(weight=2.0) == pytest.approx(2 * loss(), rel=1e-6)


def test_terms_are_values(monkeypatch):
    terms = {}
    loss(terms=terms)
    assert not terms["noise"].total.requires_grad
    monkeypatch.setattr(Noisy, "term", "loss")
    with pytest.raises(TaskError, match=r'"loss" is the loss itself'):
        loss()

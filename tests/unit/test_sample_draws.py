"""Random numbers that belong to a sample: the same whatever the micro-batch, the accumulation and the rank that draws them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dsframe.data.sample_draws import DrawTrial, RowDraws, SampleDraws
from dsframe.errors import TaskError

CPU = torch.device("cpu")


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, rows):
        return self.draw(rows)


DRAWS = {
    "dropout": functional.dropout,
    "dropout2d": functional.dropout2d,
    "rand_like": torch.rand_like,
    "rand": lambda rows: torch.rand(rows.shape),
    "randn": lambda rows: torch.randn(*rows.shape, dtype=torch.float64),
    "normal": lambda rows: torch.normal(rows, 2.0),
    "Normal": lambda rows: torch.distributions.Normal(rows, 1.0).rsample(),
    "bernoulli": lambda rows: torch.bernoulli(torch.full_like(rows, 0.3)),
    "bernoulli_": lambda rows: torch.empty_like(rows).bernoulli_(0.3),
    "normal_": lambda rows: torch.empty_like(rows).normal_(1.0, 3.0),
    "attention": lambda rows: functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5, is_causal=True),
    "a row each": lambda rows: rows * torch.rand(len(rows), 1, 1, 1),
    "rows times heads": lambda rows: functional.dropout(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]),
    "one for all": lambda rows: rows * torch.rand(()),
}


def drawn(draw, rows, size, step=3):
    model = Drawing(draw)
    its, found = SampleDraws(model, 7, size, CPU), []
    for first in range(0, len(rows), size):
        its.at(step, first)
        found.append(model(rows[first : first + size]))
    return torch.cat(found)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_does_not_depend_on_the_micro_batch(name):
    rows = torch.ones(4, 3, 5, 5)
    whole = drawn(DRAWS[name], rows, 4)
    assert torch.equal(drawn(DRAWS[name], rows, 2), whole)
    assert torch.equal(drawn(DRAWS[name], rows, 1), whole)
    assert not torch.equal(drawn(DRAWS[name], rows, 4, step=4), whole)
    if name != "one for all":
        assert not (whole == whole[0]).all()


def test_padding_to_another_length_changes_no_number():
    short, long = (drawn(torch.rand_like, torch.ones(2, 3, size, size), 2) for size in (4, 7))
    assert torch.equal(short, long[:, :, :4, :4])


def test_the_numbers_are_random():
    rows = torch.zeros(8, 50_000)
    uniform, normal = drawn(torch.rand_like, rows, 8), drawn(torch.randn_like, rows, 8)
    assert 0 <= uniform.min() < uniform.max() < 1
    for found, mean, variance in ((uniform, 0.5, 1 / 12), (normal, 0.0, 1.0)):
        assert [float(found.mean()), float(found.var())] == pytest.approx([mean, variance], abs=6e-3)
    neighbours = torch.stack([uniform[0, 1:], uniform[0, :-1], uniform[1, 1:]])
    assert torch.corrcoef(neighbours).fill_diagonal_(0).abs().max() < 0.02
    kept = drawn(lambda x: functional.dropout(x + 1, 0.25), rows, 8)
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(kept.mean()) == pytest.approx(1, abs=5e-3)
    double = drawn(lambda rows: torch.rand(rows.shape, dtype=torch.float64, requires_grad=True), rows, 8)
    assert double.requires_grad
    assert (double * 2**24 % 1).any()
    drawn(lambda rows: functional.dropout(rows, 1.0, inplace=True), rows.add_(1), 8)
    assert not rows.any()


@pytest.mark.parametrize(
    "draw",
    [
        lambda rows: torch.randint(3, 7, rows.shape).float(),
        lambda rows: rows.uniform_(-1, to=3),
        lambda rows: rows.exponential_(4.0),
        lambda rows: torch.normal(rows, 3.0),
    ],
)
def test_the_numbers_are_spread_as_torchs(draw):
    torch.manual_seed(0)
    ours, torchs = drawn(draw, torch.zeros(8, 9000), 8), draw(torch.zeros(8, 9000))
    levels = torch.tensor([0.01, 0.3, 0.7, 0.99])
    assert torch.allclose(ours.quantile(levels), torchs.quantile(levels), atol=0.2)


def test_an_evaluation_does_not_end_the_trial_of_draws():
    model = nn.Dropout()
    trial = DrawTrial(model, CPU)
    for training in (False, True):
        model.train(training)(torch.ones(2))
    assert trial.moved


def test_evaluations_draw_the_same_each_time_and_other_data_and_epochs_other_numbers():
    draws, found = RowDraws(0, CPU), []
    for data in (0, 0, 1):
        with draws.of(data, range(3)):
            found.append(torch.rand(3).tolist())
    assert found[0] == found[1] != found[2]
    for epoch in (0, 1):
        with draws.collating([(epoch, 5)]):
            found.append(torch.rand(1))
    assert found[3] != found[4]


def test_a_loss_whose_numbers_are_of_no_sample_is_refused():
    with pytest.raises(TaskError, match="the loss draws"), SampleDraws(nn.Identity(), 0, 2, CPU).of_loss():
        torch.randperm(3)


def test_two_draws_of_a_pass_differ_and_evaluation_draws_as_ever():
    model = Drawing(lambda rows: torch.stack([torch.rand_like(rows), torch.rand_like(rows)]))
    SampleDraws(model, 0, 2, CPU)
    first, second = model(torch.ones(2, 3))
    assert not torch.equal(first, second)
    model.eval()
    torch.manual_seed(1)
    found = model(torch.ones(2, 3))
    torch.manual_seed(1)
    assert torch.equal(found, torch.stack([torch.rand(2, 3), torch.rand(2, 3)]))


NOBODYS = {
    "another shape": (lambda rows: rows * torch.rand(3), r"of shape \[3\], whose first dimension is not that of"),
    "one inside another": (functional.gumbel_softmax, "inside a function of torch's"),
    "an LSTM's": (lambda rows: nn.LSTM(4, 4, 2, dropout=0.5)(rows[:, 0])[0], "inside a function of torch's"),
    "recomputed": (
        lambda rows: checkpoint(functional.dropout, rows, use_reentrant=False),
        "recomputed in the backward pass",
    ),
    "recomputed, the old way": (
        lambda rows: checkpoint(functional.dropout, rows, use_reentrant=True),
        "recomputed in the backward pass",
    ),
}


@pytest.mark.parametrize("name", NOBODYS)
def test_what_cannot_be_given_to_samples_is_an_error(name):
    draw, message = NOBODYS[name]
    with pytest.raises(TaskError, match=message):
        drawn(draw, torch.ones(4, 2, 4, 4, requires_grad=True), 4)
    assert torch.rand(3).shape == (3,)  # and nothing is left behind
    assert not torch.overrides._get_current_function_mode_stack()


def test_attention_is_torchs():
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.randn(5, 5).fill_diagonal_(1.0)  # a row of which nothing is left is NaN
    for named in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask > 0, "scale": 0.3}):
        attention = partial(functional.scaled_dot_product_attention, key=key, value=key, enable_gqa=True, **named)
        model = Drawing(partial(attention, dropout_p=1e-30))
        SampleDraws(model, 0, 2, CPU)
        torch.testing.assert_close(model(query), attention(query))

"""Embeddings with a largest norm: on ranks that look up other rows, what torch does in one process with all of them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsframe.engines.state_replica import ParameterView
from dsframe.errors import EngineError
from dsframe.model.max_norm import refuse, share_limits, written
from tests.threads import Room

ROWS = [torch.tensor([[0, 1], [1, 1]]), torch.tensor([[3, 1], [4, 0]])]
"""Looked up by each rank. Nobody looks up row 2; row 4 is short already."""


class Noting(nn.Embedding):
    """Reads its limit where it is made."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.noted = self.max_norm


def table(kind, **options):
    made = getattr(nn, kind, Noting)(5, 3, max_norm=1.0, **options)
    with torch.no_grad():  # not drawn: ranks are threads, with one generator
        made.weight.copy_(torch.arange(1.0, 16.0).view(5, 3) * torch.tensor([1.0, 1.0, 1.0, 1.0, 0.01]).unsqueeze(1))
    return made


def limited(ranks, module):
    """``module`` with its limit on all ranks, and the optimizer's copy of its weight."""
    model, master = nn.Sequential(module), module.weight.detach().clone()
    ranks.view = lambda name: {"0.weight": ParameterView(name, (5, 3), master)}[name]
    share_limits(model, ranks)
    return model, master


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag", "Noting"])
def test_rows_that_any_rank_looks_up_are_shortened_on_all(kind, norm_type):
    expected = table(kind, norm_type=norm_type)
    whole = expected(torch.cat(ROWS)).detach()

    def trained(ranks):
        rank = ranks.plan.world.rank
        model, master = limited(ranks, table(kind, norm_type=norm_type))
        outputs = model(ROWS[rank]).detach()
        assert torch.equal(model[0].weight, master)
        return outputs, master

    for rank, (outputs, master) in enumerate(Room(2).run(trained)):
        torch.testing.assert_close(master, expected.weight.detach())
        torch.testing.assert_close(outputs, whole[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize(("kind", "options"), [("Embedding", {}), ("EmbeddingBag", {"padding_idx": 3})])
def test_an_evaluation_sees_short_rows_and_changes_none(kind, options, norm_type):
    """As does a frozen table in training."""
    expected = table(kind, norm_type=norm_type, **options)(ROWS[1]).detach()
    for frozen in (False, True):
        module = table(kind, norm_type=norm_type, **options).requires_grad_(not frozen)
        model, master = limited(SimpleNamespace(), module)
        assert written(model) == (frozenset() if frozen else {"0.weight"})
        outputs = model.train(frozen)(ROWS[1])
        torch.testing.assert_close(outputs.detach(), expected)
        assert torch.equal(model[0].weight, master)


def test_an_evaluation_sees_bags_of_several_lengths():
    given = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 3])
    expected = table("EmbeddingBag", include_last_offset=True)(*given)
    (model, _) = limited(SimpleNamespace(), table("EmbeddingBag", include_last_offset=True))
    torch.testing.assert_close(model.eval()[0](*given), expected)


def test_a_pipeline_refuses_a_limit_wherever_it_is():
    with pytest.raises(EngineError, match="a pipeline cannot keep"):
        refuse(nn.Sequential(nn.Sequential(table("Embedding"))))

"""Parameters that no rank's loss uses, and that the optimizer moves all the same. Ranks are threads."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsframe.engines.unused import Unused
from tests.threads import Room

STEPS = [("a", "b"), ("c", "a"), ("a", "a"), ("ab", "ab"), ("a", "a"), ("a", "a"), ("a", "a"), ("abc", "")]
"""What the losses of ranks 0 and 1 use, in eight steps."""


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("SGD", {"momentum": 0.9}, ["", "bc", "", "bc", "", "", "", "bc"]),
        ("SGD", {"weight_decay": 0.1}, ["c", "b", "", "c", "", "", "", ""]),
        ("SGD", {}, [""] * 8),
        ("AdamW", {"weight_decay": 0.0}, ["", "bc", "", "bc", "", "", "", "bc"]),
    ],
)
def test_what_no_rank_uses_is_said_if_the_optimizer_moves_it(kind, options, said):
    """Looked for in steps 1, 2, 4 and 8. Momentum moves what another step has used, a decay what is not used in this one."""

    def trained(ranks):
        model = nn.ParameterDict({name: torch.ones(2) for name in "abc"})
        groups = [{"params": [model["a"]], "weight_decay": 0.0}, {"params": [model["b"], model["c"]]}]
        optimizer = getattr(torch.optim, kind)(groups, lr=0.1, **options)
        ranks.plan.config = SimpleNamespace(settings=SimpleNamespace(model=SimpleNamespace(compile=None)))
        ranks.plan.optimizer = SimpleNamespace(name=kind)
        unused, lines = Unused(ranks, model, optimizer), []
        for of_ranks in STEPS:
            unused.begin()
            if uses := of_ranks[ranks.plan.world.rank]:
                torch.stack([model[name] for name in uses]).sum().backward()
            lines.append("".join(unused.end()))
            assert not any(weight._backward_hooks for weight in model.values())
        return lines

    assert Room(2).run(trained) == [said] * 2

"""Computes the balancing loss of a mixture's router over the global batch, and each expert's load.

The loss of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6) is a product of two means over
tokens: how many each expert got, and the probability that the router gave it. The mean of such products over ranks
differs from the product over all tokens. But the first factor has no gradient: if it covers all ranks, the rest is a
plain mean over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsframe.cluster.exchange import Ranks
from dsframe.tasks.task import Sum, Sums


def balance(
    router_logits: Sequence[Tensor], top_k: int, mask: Tensor | None, weight: Tensor | float, ranks: Ranks | None
) -> tuple[Tensor, Sums]:
    """**Collective** with ``ranks``. Returns the balancing loss and each expert's fraction of the tokens, by name.

    The mean of the loss over ranks, weighted by ``weight``, is the loss of their combined micro-batches; it is 1 times
    ``top_k`` if all experts are used equally.

    Args:
        router_logits: Of each layer, ``[tokens, experts]``.
        top_k: Experts of each token.
        mask: Integers or bools, ``tokens`` elements in total, 0 for padding; None: all count.
        weight: Number of items that the rank's loss is a mean over, as in ``Task.loss_weight``.
    """
    experts = router_logits[0].shape[-1]
    numbers = torch.arange(experts, device=router_logits[0].device)
    tokens = router_logits[0].new_ones(len(router_logits[0])) if mask is None else mask.reshape(-1).float()
    chosen = torch.zeros(experts, device=tokens.device)
    likely = torch.zeros(experts, device=tokens.device)
    for logits in router_logits:
        shares = logits.float().softmax(-1)
        picks = (shares.detach().topk(top_k, dim=-1).indices[..., None] == numbers).sum(1)
        chosen = chosen + (picks * tokens[:, None]).sum(0)
        likely = likely + (shares * tokens[:, None]).sum(0)
    with torch.no_grad():
        routed = tokens.sum() * len(router_logits)
        counted = torch.as_tensor(weight, dtype=torch.float64, device=tokens.device).reshape(1)
        local_sums = torch.cat([chosen.double(), routed.double().reshape(1), counted])
        total = local_sums if ranks is None else ranks.sum_over_ranks(local_sums)
        used, factor = total[:experts] / total[-2], total[-1] / counted / total[-2]
    loss = experts * (used.float() * likely).sum() * factor.float()[0]
    return loss, {f"expert_load/{index}": Sum(chosen[index], routed * top_k) for index in range(experts)}

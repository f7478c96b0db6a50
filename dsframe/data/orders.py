"""Orders of the samples of an epoch, for ``Task.order``: pure functions of (seed, epoch), like everything about the data.

Each gives int64 indices, one for each place in the epoch. So no rank, worker or restart changes which samples a step has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsframe.data.sampler import permutation
from dsframe.data.source import draws
from dsframe.errors import DataError

_WEIGHTED = 0x77656967  # a stream of draws of its own


def weighted(weights: Tensor | Sequence[float], seed: int, epoch: int) -> Tensor:
    """As many samples as there are ``weights``, drawn with replacement, each in proportion to its weight (at least 0).

    Raises DataError for weights that are negative, not finite or all 0.
    """
    given = torch.as_tensor(weights, dtype=torch.float64)
    if given.ndim != 1 or not torch.isfinite(given).all() or (given < 0).any() or not given.sum() > 0:
        raise DataError("weights of samples must be one row of finite numbers of at least 0, not all of them 0")
    bits = draws(seed, epoch, torch.arange(len(given)), _WEIGHTED) >> 11 & (1 << 53) - 1
    ends = given.cumsum(0)
    chosen = torch.searchsorted(ends, bits.double() * 2.0**-53 * ends[-1], right=True)
    return chosen.clamp_(max=int(given.nonzero().max()))


def balanced(labels: Tensor | Sequence[int], seed: int, epoch: int) -> Tensor:
    """As many samples as there are ``labels``, drawn with replacement so that each class comes equally often on average."""
    _, classes, counts = torch.as_tensor(labels).unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    return weighted(1.0 / counts[classes], seed, epoch)


def by_length(lengths: Tensor | Sequence[int], global_batch_size: int, seed: int, epoch: int, pool: int = 50) -> Tensor:
    """Every sample once, such that those of a global batch are about equally long, and little is padded.

    Shuffled, cut into pools of ``pool`` global batches, each sorted by length, longest first; then whole batches are shuffled.
    Which samples share a batch follows from ``global_batch_size``, as with Hugging Face's ``group_by_length``. A last batch that
    is not whole comes last.
    """
    of = torch.as_tensor(lengths)
    order = permutation(len(of), seed, epoch)
    pools = [part[of[part].argsort(descending=True, stable=True)] for part in order.split(pool * global_batch_size)]  # type: ignore[no-untyped-call]
    batches = torch.cat(pools).split(global_batch_size)  # type: ignore[no-untyped-call]
    whole = len(of) // global_batch_size
    shuffled = [batches[position] for position in permutation(whole, seed + 1, epoch).tolist()]
    return torch.cat([*shuffled, *batches[whole:]])

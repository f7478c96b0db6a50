"""Gathers the rows of all ranks for one loss, with the gradients of one process: contrastive learning, metric learning.
Each rank computes the same loss of all rows. The backward pass gives a rank the sum of all ranks' gradients of its
rows, too large by the number of ranks; engines average over ranks, which yields the gradient of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsframe.cluster.exchange import Ranks
from dsframe.errors import TaskError


def all_rows(ranks: Ranks, rows: Tensor) -> Tensor:
    """**Collective.** Returns the ``rows`` of all ranks, ``[ranks * len(rows), ...]``, in rank order. Raises TaskError
    if ranks do not each read their own samples, or if a step has several micro-batches."""
    batch, world = ranks.plan.batch, ranks.plan.world
    if batch.data_parallel_size != world.size:
        raise TaskError("all_rows() is not possible with a pipeline, tensor or sequence parallelism")
    if batch.accumulation_steps > 1:
        raise TaskError(
            f"all_rows() sees one micro-batch of each rank, and a step has {batch.accumulation_steps}; write "
            '"gradient_accumulation_steps": 1, so that the loss is over the global batch'
        )
    if world.size == 1:
        return rows
    gathered: Tensor = _Gather.apply(rows, ranks)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """Gathers by a sum, the one collective of every engine, of tables that are zero but for a rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.rows = ranks, len(rows)
        wide = _transport(rows.dtype)
        table = rows.new_zeros((ranks.plan.world.size * len(rows), *rows.shape[1:]), dtype=wide)
        table[_rows_of(ctx)] = rows.to(wide)
        return ranks.sum_over_ranks(table).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        total = ctx.ranks.sum_over_ranks(gradient.contiguous().to(_transport(gradient.dtype)))
        return total[_rows_of(ctx)].to(gradient.dtype), None


def _rows_of(ctx: Any) -> slice:
    first = ctx.ranks.plan.world.rank * ctx.rows
    return slice(first, first + ctx.rows)


def _transport(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for the sum. Integers < 2 ** 53 are exact in float64; Gloo lacks some 16-bit formats."""
    if not dtype.is_floating_point:
        return torch.float64
    return torch.promote_types(dtype, torch.float32)

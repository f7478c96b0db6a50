"""Gathers text and tensors from all ranks with the one collective that all engines have."""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from dsframe.errors import WorldError


class Ranks(Protocol):
    """The part of an engine that this module needs."""

    plan: Any

    def sum_over_ranks(self, values: Tensor) -> Tensor: ...


_FRAME = float(1 << 40)
"""Added to each length, so that numbers of another exchange, such as a digest, are not taken for lengths."""
_MOST_BYTES = 1 << 30
"""Limit for the text of a rank."""


def all_gather_text(ranks: Ranks, text: str) -> list[str]:
    """**Collective.** Returns every rank's ``text``, in rank order; also a barrier. For kilobytes, as all are summed.

    Each float64 carries four bytes; it represents integers below 2 ** 53 exactly.
    """
    world, device = ranks.plan.world, ranks.plan.device
    content = text.encode()
    words = np.frombuffer(content + bytes(-len(content) % 4), np.uint32).astype(np.float64)
    sizes = torch.zeros(world.size, dtype=torch.float64, device=device)
    sizes[world.rank] = _FRAME + len(content)
    lengths = [int(size - _FRAME) for size in ranks.sum_over_ranks(sizes).tolist()]
    if not all(0 <= length < _MOST_BYTES for length in lengths):
        raise WorldError(
            "the processes of this run exchange different things, so they do not do the same; start all with the same command, "
            "files and versions"
        )
    width = -(-max(lengths) // 4)
    if width == 0:
        return [""] * world.size
    table = torch.zeros(world.size, width, dtype=torch.float64, device=device)
    table[world.rank, : len(words)] = torch.from_numpy(words).to(device)
    rows = ranks.sum_over_ranks(table.reshape(-1)).reshape(world.size, width).cpu().numpy()
    return [row.astype(np.uint32).tobytes()[:length].decode() for row, length in zip(rows, lengths, strict=True)]


def all_gather_json(ranks: Ranks, value: Any) -> list[Any]:
    """**Collective.** Returns every rank's JSON ``value``, in rank order."""
    return [json.loads(text) for text in all_gather_text(ranks, json.dumps(value))]


_WORD_BYTES = 4
"""Bytes of a row per float64: such integers, and their sum with zeros, are exact."""
_PIECE_BYTES = 4 << 20
"""Bytes of a row that are sent at once."""


def aligned(size: int) -> int:
    """Returns ``size`` in bytes, rounded up to the alignment of :func:`sum_rows`."""
    return -(-size // _WORD_BYTES) * _WORD_BYTES


def sum_rows(ranks: Ranks, row: Tensor) -> None:
    """**Collective.** Fills ``row`` (uint8, on the CPU): each rank has set its aligned parts, and zeros elsewhere."""
    for piece in torch.split(row, _PIECE_BYTES):
        words = ranks.sum_over_ranks(piece.view(torch.int32).to(ranks.plan.device).double())
        piece.copy_(words.to(torch.int32).cpu().view(torch.uint8))


def all_gather_tensor(ranks: Ranks, tensor: Tensor) -> list[Tensor]:
    """**Collective.** Returns every rank's ``tensor`` (of any shape and dtype), in rank order, on the CPU, bitwise.

    For megabytes: every rank gets all. A tensor without elements takes the dtype of the others.
    """
    local = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)  # strides too, of one element
    fact = {"dtype": str(local.dtype).removeprefix("torch."), "shape": list(local.shape)}
    facts = all_gather_json(ranks, fact)
    dtypes = [getattr(torch, fact_of["dtype"]) for fact_of in facts]
    sizes = [dtype.itemsize * math.prod(fact_of["shape"]) for dtype, fact_of in zip(dtypes, facts, strict=True)]
    starts = [0, *itertools.accumulate(map(aligned, sizes))]
    row = torch.zeros(starts[-1], dtype=torch.uint8)
    rank = ranks.plan.world.rank
    row[starts[rank] : starts[rank] + sizes[rank]] = local.reshape(-1).view(torch.uint8)
    sum_rows(ranks, row)
    filled = next((dtype for dtype, size in zip(dtypes, sizes, strict=True) if size), dtypes[0])
    return [
        row[start : start + size].clone().view(dtype if size else filled).reshape(fact_of["shape"])
        for start, size, dtype, fact_of in zip(starts, sizes, dtypes, facts, strict=False)
    ]


def failures(ranks: Ranks, failure: str) -> list[str]:
    """**Collective.** Returns every rank's ``failure``, if not "", as ``rank R: ...``."""
    if not any_rank(ranks, bool(failure)):  # without failures, the amount sent does not grow with the number of ranks
        return []
    return [f"rank {rank}: {text}" for rank, text in enumerate(all_gather_text(ranks, failure)) if text]


def any_rank(ranks: Ranks, holds: bool) -> bool:
    """**Collective.** Returns, on every rank alike, whether ``holds`` is true on any rank."""
    return bool(
        ranks.sum_over_ranks(torch.tensor([float(holds)], dtype=torch.float64, device=ranks.plan.device)).item()
    )


def same(ranks: Ranks, text: str) -> bool:
    """**Collective.** Returns, on every rank alike, whether all have the same text. Each sends only 16 bytes.

    The digests are summed: if all are equal, the sum is the number of ranks times this rank's. A second collective
    tells all ranks whether one found a difference, because one rank's digest can be the mean of the others'.
    """
    size = ranks.plan.world.size
    digest = xxh3_128_hexdigest(text.encode())
    words = [float(int(digest[at : at + 8], 16)) for at in range(0, 32, 8)]  # exact for two million ranks
    sums = torch.tensor(words, dtype=torch.float64, device=ranks.plan.device)
    return not any_rank(ranks, not torch.equal(ranks.sum_over_ranks(sums), size * sums))


def first_difference(ranks: Ranks, entries: Sequence[str]) -> list[str]:
    """**Collective.** Returns each rank's entry at the first position where ``entries`` differ; empty if all are equal.

    A rank with fewer entries has "" there. Costs one exchange of a digest if all are equal, otherwise one more for each
    step of a bisection: gathering a large model's parameter lists from a thousand ranks would take gigabytes.
    """

    def differ(count: int | None = None) -> bool:
        return not same(ranks, json.dumps(entries[:count]))

    if not differ():
        return []
    longest = max(all_gather_json(ranks, len(entries)))
    position = bisect_left(range(longest), True, key=lambda position: differ(position + 1))
    return all_gather_text(ranks, entries[position] if position < len(entries) else "")


def by_value(of_ranks: Sequence[str]) -> str:
    """Returns the ranks' texts, one per rank, as ``A on ranks 0, 2; B on rank 1``."""
    having: dict[str, list[int]] = {}
    for rank, text in enumerate(of_ranks):
        having.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {numbered(ranks)}" for text, ranks in having.items())


def numbered(ranks: Sequence[int]) -> str:
    """Returns ``rank 1`` or ``ranks 1, 3``; for many, the first eight and the number of further ones."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"

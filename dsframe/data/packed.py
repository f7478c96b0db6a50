"""Rows of whole documents from memory-mapped tokens: one document a row, or as many as fit, which do not see each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsframe.data.sampler import Part
from dsframe.data.source import Batch
from dsframe.data.tokenised import Tokenised

IGNORED = -100
"""Target of a position that the loss leaves out."""
_MULTIPLE = 8
"""Rows of one document are padded to a multiple of it."""


class RowSource:
    """Rows of ``tokenised``: inputs by name, and the token after each, or IGNORED.

    With ``together`` a row holds several documents and has ``context`` positions: ``position_ids`` start anew at each document, and
    there is no mask, by which models of transformers keep them apart. Else a row is one document, padded to the longest of the
    micro-batch, with an ``attention_mask``.
    """

    def __init__(
        self,
        tokenised: Tokenised,
        context: int,
        *,
        together: bool,
        samples: int | None = None,
    ) -> None:
        """``samples``: only so many rows."""
        self._tokens, self._pieces, self._ends = tokenised.tokens, tokenised.pieces, tokenised.rows
        self._context, self._together = context, together
        self._length = min(len(self._ends), samples or len(self._ends))

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Tensor, epoch: int) -> Batch:
        return self.gather([(epoch, indices)])

    def _wide(self, filled: Any) -> int:
        wide = -(-int(filled.max()) // _MULTIPLE) * _MULTIPLE
        return self._context if self._together else min(wide, self._context)

    def _laid(self, chosen: Any) -> tuple[Any, Any, Any]:
        """The pieces of all rows, the row of each, and how many positions of each row are filled."""
        chosen = chosen % len(self)
        begins = np.where(chosen > 0, self._ends[chosen - 1], 0)
        counts = self._ends[chosen] - begins  # pieces of each row
        pieces = self._pieces[_ranges(begins, counts)]
        row = np.repeat(np.arange(len(chosen)), counts)
        lengths = pieces[:, 1] - 1  # the last token is only a target
        return pieces, row, np.bincount(row, weights=lengths, minlength=len(chosen)).astype(np.int64)

    def gather(self, parts: list[Part]) -> Batch:
        """The rows of all parts as one batch: padding does not end with an epoch."""
        chosen = np.concatenate([rows.numpy() for _, rows in parts])
        pieces, row, filled = self._laid(chosen)
        lengths, width = pieces[:, 1] - 1, self._wide(filled)
        # Where each piece begins in its row: behind those before it.
        before = np.cumsum(lengths) - lengths
        first = before - (np.cumsum(filled) - filled)[row] + row * width
        source, position = _ranges(pieces[:, 0], lengths), _ranges(first, lengths)
        tokens, after = self._tokens[source], self._tokens[source + 1]

        def laid(values: Any, fill: int) -> Tensor:
            table = np.full(len(chosen) * width, fill, np.int64)
            table[position] = values
            return torch.from_numpy(table.reshape(len(chosen), width))

        inputs = {"input_ids": laid(np.maximum(tokens, ~tokens), 0)}
        targets = laid(np.where(after < 0, IGNORED, after), IGNORED)
        if self._together:
            inputs["position_ids"] = laid(_ranges(np.zeros_like(lengths), lengths), 0)
        else:
            inputs["attention_mask"] = laid(1, 0)
        return inputs, targets


def _ranges(begins: Any, counts: Any) -> Any:
    """``begins[0], begins[0] + 1, ...`` (``counts[0]`` of them), then those of ``begins[1]``, and so on."""
    total = int(counts.sum())
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(total)

"""Rows of documents from memory-mapped tokens: one per row, or as many as fit, without attention between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsframe.data.sampler import Part
from dsframe.data.source import Batch
from dsframe.data.tokenised import Tokenised

IGNORED = -100
"""Target of a position that the loss ignores."""
_MULTIPLE = 8
"""Rows of one document are padded to a multiple of this."""


class RowSource:
    """Rows of ``tokenised``: inputs by name, and the next token of each, or IGNORED.

    With ``together`` a row holds several documents and has ``context`` positions. ``position_ids`` restart at each
    document and there is no mask, from which transformers' models know to separate documents. Otherwise a row is one
    document, padded to the longest of the micro-batch, with an ``attention_mask``.
    """

    digest_of_files = ""
    """Digest of the contents of the files it was read from."""

    def __init__(
        self,
        tokenised: Tokenised,
        context: int,
        *,
        together: bool,
        samples: int | None = None,
    ) -> None:
        """``samples``: number of rows to use."""
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

    def _layout(self, chosen: Any) -> tuple[Any, Any, Any]:
        """Returns the pieces of all rows, each piece's row, and each row's number of filled positions."""
        chosen = chosen % len(self)
        begins = np.where(chosen > 0, self._ends[chosen - 1], 0)
        counts = self._ends[chosen] - begins  # pieces of each row
        pieces = self._pieces[_ranges(begins, counts)]
        row = np.repeat(np.arange(len(chosen)), counts)
        lengths = pieces[:, 1] - 1  # the last token is only a target
        return pieces, row, np.bincount(row, weights=lengths, minlength=len(chosen)).astype(np.int64)

    def gather(self, parts: list[Part]) -> Batch:
        """Returns all rows as one batch, padded to one width across epochs."""
        chosen = np.concatenate([rows.numpy() for _, rows in parts])
        pieces, row, filled = self._layout(chosen)
        lengths, width = pieces[:, 1] - 1, self._wide(filled)
        # start of each piece in its row: after the pieces before it
        before = np.cumsum(lengths) - lengths
        first = before - (np.cumsum(filled) - filled)[row] + row * width
        source, position = _ranges(pieces[:, 0], lengths), _ranges(first, lengths)
        tokens, after = self._tokens[source], self._tokens[source + 1]

        def to_table(values: Any, fill: int) -> Tensor:
            table = np.full(len(chosen) * width, fill, np.int64)
            table[position] = values
            return torch.from_numpy(table.reshape(len(chosen), width))

        inputs = {"input_ids": to_table(np.maximum(tokens, ~tokens), 0)}
        targets = to_table(np.where(after < 0, IGNORED, after), IGNORED)
        if self._together:
            inputs["position_ids"] = to_table(_ranges(np.zeros_like(lengths), lengths), 0)
        else:
            inputs["attention_mask"] = to_table(1, 0)
        return inputs, targets


def _ranges(begins: Any, counts: Any) -> Any:
    """Returns ``begins[0], begins[0] + 1, ...`` (``counts[0]`` numbers), then those of ``begins[1]``, ..."""
    total = int(counts.sum())
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(total)

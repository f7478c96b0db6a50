"""Preference pairs: an answer that was chosen and one that was rejected, for tasks that learn the difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dsframe.data.collate import Pad
from dsframe.data.documents import Row
from dsframe.data.encoders import ConversationEncoder
from dsframe.data.packed import IGNORED
from dsframe.errors import DataError


@dataclass(frozen=True)
class Preferences:
    """A ``collate`` for rows with ``prompt``, ``chosen`` and ``rejected``: texts, or lists of messages as in conversations.

    Inputs are ``input_ids`` and ``attention_mask``, int64 ``[rows, 2, longest of the micro-batch]``, the chosen answer first;
    targets the token after each, of the same shape, -100 but for the answers. A sample stays one row, so a model takes
    ``input_ids.flatten(0, 1)``.
    """

    tokenizer: Any
    """A tokenizer of transformers."""
    context: int
    """Positions of a row, at most; a longer answer is cut at its end."""
    template: str | None = None
    """Chat template for messages, in place of the tokenizer's own."""
    multiple: int = 8
    """The padded length is a multiple of it."""

    def __call__(self, rows: list[Mapping[str, Any]]) -> tuple[dict[str, Tensor], Tensor]:
        """The rows as a batch. Raises DataError where a column is not there, or the prompt leaves no room for an answer."""
        encoder, answers = ConversationEncoder(self.tokenizer, self.template), list[Mapping[str, Any]]()
        for number, row in enumerate(rows):
            for name in ("chosen", "rejected"):
                source = f"row {number} of the batch, {name}"
                if row.get("prompt") is None or row.get(name) is None:
                    raise DataError(
                        f"{source}: a row needs prompt, chosen and rejected; it has {', '.join(map(repr, row))}"
                    )
                pair = {"prompt": row["prompt"], "completion": row[name], "tools": row.get("tools")}
                (tokens,) = encoder.encode([Row(source, pair)])
                tokens = tokens[: self.context + 1]
                if not (tokens[1:] >= 0).any():
                    raise DataError(
                        f"{source}: nothing of the answer is within context {self.context}; leave such rows out"
                    )
                ids, targets = np.maximum(tokens, ~tokens)[:-1], np.where(tokens[1:] < 0, IGNORED, tokens[1:])
                answers.append({"input_ids": ids.astype(np.int64), "labels": targets.astype(np.int64)})
        batch = Pad(multiple=self.multiple)(answers)
        pairs = {name: values.view(len(rows), 2, -1) for name, values in batch.items()}
        return {name: pairs[name] for name in ("input_ids", "attention_mask")}, pairs["labels"]

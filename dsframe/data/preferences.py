"""Preference pairs: an answer that was chosen and one that was rejected, for tasks that learn the difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
        encoder, answers = ConversationEncoder(self.tokenizer, self.template), []
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
                answers.append(tokens)
        longest = max(len(tokens) for tokens in answers) - 1
        width = -(-longest // self.multiple) * self.multiple
        ids, mask = (np.zeros((len(answers), width), np.int64) for _ in range(2))
        targets = np.full((len(answers), width), IGNORED, np.int64)
        for line, tokens in enumerate(answers):
            size = len(tokens) - 1
            ids[line, :size], mask[line, :size] = np.maximum(tokens, ~tokens)[:-1], 1
            targets[line, :size] = np.where(tokens[1:] < 0, IGNORED, tokens[1:])
        shape = (len(rows), 2, width)
        inputs = {"input_ids": torch.from_numpy(ids).view(shape), "attention_mask": torch.from_numpy(mask).view(shape)}
        return inputs, torch.from_numpy(targets).view(shape)

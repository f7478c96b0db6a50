"""The task of tests/engines/test_exports.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

import dsframe
from tests.engines import exported


class Exported(dsframe.Task):
    """One of :data:`exported.KINDS`, on twelve rows."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return exported.base(self.kind)  # type: ignore[no-any-return]

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return exported.loss_of(outputs.logits, targets)

    def pretrained(self) -> Mapping[str, Any]:
        config = exported.base(self.kind).config
        return {"config": config.to_json_string(use_diff=False), "tokenizer": None, "tokenizer_sha256": ""}

    def train_data(self) -> Any:
        name, inputs, targets = exported.rows(self.kind)
        return [{name: row, "labels": target} for row, target in zip(inputs, targets, strict=True)]

    eval_data = train_data

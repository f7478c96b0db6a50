"""The task of tests/engines/test_exports.py."""

import dsframe
from tests.engines import exported


class Exported(dsframe.Task):
    """One of :data:`exported.KINDS`, on twelve rows."""

    def __init__(self, kind):
        self.kind = kind

    def model(self):
        return exported.base(self.kind)

    def loss(self, outputs, targets):
        return exported.loss_of(outputs.logits, targets)

    def pretrained(self):
        config = exported.base(self.kind).config
        return {"config": config.to_json_string(use_diff=False), "tokenizer": None, "tokenizer_sha256": ""}

    def train_data(self):
        name, inputs, targets = exported.rows(self.kind)
        return [{name: row, "labels": target} for row, target in zip(inputs, targets, strict=True)]

    eval_data = train_data

"""Configuration files, and what runs write, as values."""

from __future__ import annotations

import json


def ds_config(
    batch,
    optimizer=None,
    lr=None,
    /,
    sections=None,
    **settings,
):
    """A file: its batch, its optimizer, DeepSpeed's other sections, and the settings of the section "dsframe"."""
    document = {"train_batch_size": batch}
    if optimizer is not None:
        params = {} if lr is None else {"params": {"lr": lr}}
        document["optimizer"] = {"type": optimizer, **params} if isinstance(optimizer, str) else optimizer
    document |= sections or {}
    if settings:
        document.setdefault("dsframe", settings)
    return document


def zero(stage, **more):
    """The section of a ZeRO stage."""
    return {"zero_optimization": {"stage": stage, **more}}


def write_json(path, value):
    path.write_text(json.dumps(value))
    return path


def read_json(path):
    return json.loads(path.read_text())


def read_rows(path):
    """The lines of a file of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]

"""Configuration files, and what runs write, as values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def ds_config(
    batch: int,
    optimizer: str | Mapping[str, Any] | None = None,
    lr: float | None = None,
    /,
    sections: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A file: its batch, its optimizer, DeepSpeed's other sections, and the settings of the section "dsframe"."""
    document: dict[str, Any] = {"train_batch_size": batch}
    if optimizer is not None:
        params = {} if lr is None else {"params": {"lr": lr}}
        document["optimizer"] = {"type": optimizer, **params} if isinstance(optimizer, str) else optimizer
    document |= sections or {}
    if settings:
        document.setdefault("dsframe", settings)
    return document


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_rows(path: Path) -> list[Any]:
    """The lines of a file of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]

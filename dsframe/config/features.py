"""Names the features that a file switches on, so that an engine can refuse those that it does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from dsframe.config.read.reader import Path, keys
from dsframe.config.schema.conditions import Row, holds, matches, value_at
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import Settings
from dsframe.text import table_of

LOGGERS = ("tensorboard", "wandb")
"""DeepSpeed's sections for metric loggers, named like the packages that they need. The same on every engine."""
WATCHING = frozenset({*LOGGERS, "csv_monitor", "comet", "flops_profiler", "comms_logger"})
"""Sections that only observe training: removed before DeepSpeed reads the file, and the same on every engine."""

MADE_HERE = frozenset({"optimizer", "scheduler"})
"""Sections that dsframe builds itself on every engine. Their unknown keys are not forwarded to DeepSpeed."""


def needed_packages(file: DeepSpeed, settings: Settings) -> Iterator[tuple[Path, str]]:
    """Yields each key that needs a package, and the package's module."""
    for section in LOGGERS:
        if file.on(section):
            yield (section, "enabled"), section


class Feature(NamedTuple):
    """One feature that the file uses."""

    name: str
    """Stable name, as in the table of engines."""
    path: str
    """Dotted path of the key."""
    description: str
    """Description that can begin a sentence: ``tensor parallelism over 2 ranks``."""
    line: int = 0
    column: int = 0


@cache
def _table() -> Sequence[Row]:
    rows: list[Row] = table_of(__file__)
    return rows


def features(file: DeepSpeed, position: Callable[[Path], tuple[int, int]] = lambda path: (0, 0)) -> tuple[Feature, ...]:
    """Returns every feature that the file switches on, in the order of DeepSpeed's documentation.

    A row of ``features.json`` applies if its key's value is one of ``is``, or without ``is``, not the default.
    ``position`` returns a key's line and column, like ``Config.position``.
    """
    on = []
    for row in _table():
        if matches(file, row["key"], row.get("is")) and holds(file, row):
            path, value = row.get("path", row["key"]), value_at(file, row["key"])
            on.append(Feature(row["name"], path, row["says"].format(value), *position(keys(path))))
    return tuple(on)


def own_adam(file: DeepSpeed) -> bool:
    """True if DeepSpeed's own Adam is used: on request, or because torch's lacks a feature that the file asks for."""
    params = file.optimizer.params if file.optimizer else {}
    by_torch = params.get("torch_adam")
    if by_torch is None:
        return params.get("bias_correction") is False
    return not by_torch


def makes_groups(file: DeepSpeed) -> str:
    """Returns the DeepSpeed optimizer that builds its own parameter groups, which excludes others; else ""."""
    name = file.optimizer.type if file.optimizer else ""
    return name if name.lower() == "muon" else ""

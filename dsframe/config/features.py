"""The features that a file switches on, by name, so that an engine can refuse those that it does not support."""

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
"""DeepSpeed's sections that say where metrics are written, and the packages that they need: the same on every engine."""
WATCHING = frozenset({*LOGGERS, "csv_monitor", "comet", "flops_profiler", "comms_logger"})
"""Sections of DeepSpeed's that only watch the training: they are taken off before DeepSpeed sees them, and mean the same on every
engine."""

MADE_HERE = frozenset({"optimizer", "scheduler"})
"""Sections from which dsframe makes what trains, the same on every engine; unknown keys are not forwarded."""


def needed_packages(file: DeepSpeed, settings: Settings) -> Iterator[tuple[Path, str]]:
    """The keys that need a package, and its module."""
    for section in LOGGERS:
        if file.on(section):
            yield (section, "enabled"), section


class Feature(NamedTuple):
    """One thing that the file asks for."""

    name: str
    """Stable name, as in the engines' table."""
    path: str
    """Dotted path of the key that asks for it."""
    description: str
    """Text for the start of a sentence: ``tensor parallelism over 2 ranks``."""
    line: int = 0
    column: int = 0


@cache
def _table() -> Sequence[Row]:
    rows: list[Row] = table_of(__file__)
    return rows


def features(file: DeepSpeed, position: Callable[[Path], tuple[int, int]] = lambda path: (0, 0)) -> tuple[Feature, ...]:
    """Everything that the file switches on, in the order of DeepSpeed's documentation.

    A row of ``features.json`` is on if its key's value is one of ``is``, or another than the default. ``position`` gives line
    and column of a key, as ``Config.position`` does.
    """
    on = []
    for row in _table():
        if matches(file, row["key"], row.get("is")) and holds(file, row):
            path, value = row.get("path", row["key"]), value_at(file, row["key"])
            on.append(Feature(row["name"], path, row["says"].format(value), *position(keys(path))))
    return tuple(on)


def own_adam(file: DeepSpeed) -> bool:
    """True if the file's Adam is DeepSpeed's own: on request, or because torch's cannot do what the file asks for."""
    params = file.optimizer.params if file.optimizer else {}
    by_torch = params.get("torch_adam")
    if by_torch is None:
        return params.get("bias_correction") is False
    return not by_torch


def makes_groups(file: DeepSpeed) -> str:
    """Who makes groups of parameters inside DeepSpeed, so that nobody else can; empty: nobody."""
    name = file.optimizer.type if file.optimizer else ""
    return name if name.lower() == "muon" else ""

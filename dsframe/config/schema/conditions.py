"""Conditions on the values of a file, for the tables of features and rules.

A row holds if all conditions in ``with`` and none in ``without`` hold. A condition maps a dotted path to the matching
values, or to null for any value but the default. 1 rank, stage or step counts as the default 0 or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsframe.config.schema.file import File

Row = Mapping[str, Any]
_DEFAULTS = File.model_construct()


def value_at(owner: Any, path: str) -> Any:
    """Returns the value of a typed file at a dotted path; None if there is none."""
    for part in path.split("."):
        owner = owner.get(part) if isinstance(owner, Mapping) else getattr(owner, part, None)
    return owner


def matches(file: Any, path: str, wanted: Sequence[Any] | None = None) -> bool:
    """True if the value at ``path`` is one of ``wanted``; without ``wanted``, if it differs from the default."""
    value = value_at(file, path)
    if wanted is not None:
        return any(_same(value, other) for other in wanted)
    default = value_at(_DEFAULTS, path)
    if isinstance(value, bool):
        return value is not bool(default)
    return bool(value != default and (default or value not in (None, 0, 1, [], "none")))


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, str) and isinstance(other, str):
        return value.lower() == other.lower()
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def holds(file: Any, row: Row) -> bool:
    """True if the conditions of a row hold."""
    return all(matches(file, path, wanted) for path, wanted in row.get("with", {}).items()) and not any(
        matches(file, path, wanted) for path, wanted in row.get("without", {}).items()
    )

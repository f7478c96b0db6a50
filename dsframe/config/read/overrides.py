"""``--set dotted.key=value``: changes to the file from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsframe.config.read.findings import Findings
from dsframe.config.read.reader import Path, Raw, value_of

_EXCLUSIVE: dict[Path, Path] = {
    ("dsframe", "steps"): ("dsframe", "epochs"),
    ("dsframe", "epochs"): ("dsframe", "steps"),
}


def split(override: str) -> tuple[Path, str] | None:
    """Returns the path and the value's text; None without ``=`` or without a key."""
    key, equals, value = override.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    return (parts, value.strip()) if equals and all(parts) else None


def paths(overriding: Sequence[str]) -> list[Path]:
    """Returns the paths that overrides set."""
    return [parsed[0] for parsed in map(split, overriding) if parsed]


def apply(raw: Raw, overriding: Sequence[str], findings: Findings) -> None:
    """Sets each value in ``raw``. Later ones win. The keys are checked later, with the rest of the file."""
    for override in overriding:
        parsed = split(override)
        if parsed is None:
            findings.overridden.add((override,))
            message, remedy = "does not have the form dotted.key=value", 'write for example "dsframe.steps=50"'
            findings.error((override,), message, remedy, code="override")
            continue
        path, text = parsed
        owner: Raw = raw
        for part in path[:-1]:
            below: Any = owner.get(str(part))
            if not isinstance(below, dict):
                below = owner[str(part)] = {}
            owner = below
        owner[str(path[-1])] = value_of(text)
        other = _EXCLUSIVE.get(path)
        if other and other not in paths(overriding):
            owner.pop(str(other[-1]), None)  # the command line replaces the file's training length

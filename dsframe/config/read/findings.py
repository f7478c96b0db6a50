"""Collects the problems of one file, with their places, while it is repaired and checked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from dsframe.config.read.reader import Document, Path
from dsframe.config.schema.base import AUTO
from dsframe.errors import Problem, Severity

OVERRIDE = "--set"
"""The file name of problems with overrides."""


class Fix(NamedTuple):
    """An edit that ``dsframe check --fix`` can make without changing what the file means."""

    path: Path
    """The member as written."""
    target: Path
    """Where it belongs, under its right name. Equal to ``path`` when only the value changes."""
    value: Any = None
    """The new value, where ``replace`` is set."""
    replace: bool = False
    remove: bool = False
    """Remove the member: it has no effect or is the default."""


class Resolved(NamedTuple):
    """A value that was ``"auto"`` or follows from others, and why it is what it is."""

    path: Path
    value: Any
    reason: str
    was: Any = AUTO
    """What the file says."""


def dotted(path: Path) -> str:
    """``a.b[2].c``"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def show(value: Any) -> str:
    """A value as JSON, short enough for a message."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Findings:
    """Problems, fixes and resolved values of one file."""

    def __init__(self, document: Document, file: str, overridden: Iterable[Path] = ()) -> None:
        self.document = document
        self.file = file
        self.overridden = set(overridden)
        self.problems: list[Problem] = []
        self.fixes: list[Fix] = []
        self.resolved: list[Resolved] = []
        self.pending: set[Path] = set()
        """Members that wait for the model or the data, as "auto" does."""
        self._moved: dict[Path, Path] = {}

    def anew(self) -> Findings:
        """The same file's, with nothing found yet."""
        fresh = Findings(self.document, self.file, self.overridden)
        fresh._moved = self._moved
        return fresh

    def moved(self, old: Path, new: Path) -> None:
        """Remember that what the file has at ``old`` is handled as if it stood at ``new``."""
        self._moved[new] = self.written(old)

    def written(self, path: Path) -> Path:
        """The path in the file of what is handled at ``path``."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._moved:
                return self._moved[path[:length]] + path[length:]
        return path

    def add(
        self,
        severity: Severity,
        path: Path,
        message: str,
        remedy: str = "",
        *,
        code: str,
        at_value: bool = False,
        offset: int | None = None,
    ) -> None:
        """Report one finding about the member handled at ``path``."""
        path = self.written(path)
        if any(path[: len(prefix)] == prefix for prefix in self.overridden):
            file, line, column = OVERRIDE, 0, 0
        else:
            file = self.file
            place = self.offset(path, at_value) if offset is None else offset
            line, column = (0, 0) if place is None else self.document.position(place)
        problem = Problem(severity, dotted(path), message, remedy, file, line, column, code=code)
        if problem not in self.problems:
            self.problems.append(problem)

    def error(self, path: Path, message: str, remedy: str = "", *, code: str, at_value: bool = False) -> None:
        self.add("error", path, message, remedy, code=code, at_value=at_value)

    def warning(self, path: Path, message: str, remedy: str = "", *, code: str, at_value: bool = False) -> None:
        self.add("warning", path, message, remedy, code=code, at_value=at_value)

    def note(self, path: Path, message: str, remedy: str = "", *, code: str, at_value: bool = False) -> None:
        self.add("note", path, message, remedy, code=code, at_value=at_value)

    def resolve(self, path: Path, value: Any, reason: str) -> None:
        """Record that ``"auto"`` at ``path`` became ``value``."""
        self.resolved.append(Resolved(path, value, reason))
        self.note(path, f'"auto" is {show(value)}: {reason}', code="auto", at_value=True)

    def offset(self, path: Path, at_value: bool) -> int | None:
        """Return the offset of ``path``: of the member, else of the nearest one around it; None if the file has no text."""
        spans = self.document.spans
        if path in spans:
            return spans[path].start if at_value else spans[path].key_start
        for length in range(len(path) - 1, 0, -1):
            if path[:length] in spans:
                return spans[path[:length]].key_start
        return None

    def mentions(self, path: str) -> bool:
        """True if something is already reported about ``path``, dotted."""
        return any(problem.path == path for problem in self.problems)

    def fails(self, path: Path) -> bool:
        """True if an error is already reported at or under ``path``."""
        text = dotted(self.written(path))
        return any(
            problem.severity == "error" and (problem.path == text or problem.path.startswith((f"{text}.", f"{text}[")))
            for problem in self.problems
        )

    def sorted(self) -> tuple[Problem, ...]:
        """All problems in the order of the file; those without a place last."""
        rank = {"error": 0, "warning": 1, "note": 2}
        return tuple(sorted(self.problems, key=lambda p: (p.line == 0, p.line, p.column, rank[p.severity])))

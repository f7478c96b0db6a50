"""Collects the problems of one file, with their positions, while it is repaired and checked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partialmethod
from typing import Any, NamedTuple

from dsframe.config.read.reader import Document, Path, inside, keys
from dsframe.config.schema.base import AUTO
from dsframe.errors import Problem, Severity

OVERRIDE = "--set"
"""File name of problems with overrides."""


class Resolved(NamedTuple):
    """A value that replaces ``"auto"`` or follows from others, with the reason."""

    path: Path
    value: Any
    reason: str
    was: Any = AUTO
    """The value in the file."""
    detail: str = ""
    """The part of the reason that applies only to this value."""


def dotted(path: Path) -> str:
    """Returns a path as text: ``a.b[2].c``"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def show(value: Any) -> str:
    """Returns a value as JSON, shortened for a message."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Findings:
    """Problems and resolved values of one file. A path is a tuple, or dotted text if no key has a dot."""

    def __init__(self, document: Document, file: str, overridden: Iterable[Path] = ()) -> None:
        self.document = document
        self.file = file
        self.overridden = set(overridden)
        self.problems: list[Problem] = []
        self.resolved: list[Resolved] = []
        self.pending: set[Path] = set()
        """Members that wait for facts about the model or the data, such as "auto"."""
        self._moved: dict[Path, Path] = {}
        self._answered: set[Path] = set()

    def empty_copy(self) -> Findings:
        """Returns findings for the same file without any problem."""
        copy = Findings(self.document, self.file, self.overridden)
        copy._moved, copy._answered = self._moved, self._answered
        return copy

    def moved(self, old: Path, new: Path) -> None:
        """Records that the file's member at ``old`` is handled as if it were at ``new``."""
        self._moved[new] = self.written(old)

    def answered(self, path: Path) -> None:
        """Records that a member has been reported: further messages about it are dropped, although its value is
        used."""
        self._answered.add(path)

    def written(self, path: Path) -> Path:
        """Returns where the member handled at ``path`` is in the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._moved:
                return self._moved[path[:length]] + path[length:]
        return path

    def add(
        self,
        severity: Severity,
        path: str | Path,
        message: str,
        remedy: str = "",
        *,
        code: str,
        at_value: bool = False,
        offset: int | None = None,
    ) -> None:
        """Reports a problem of the member handled at ``path``."""
        path = self.written(keys(path))
        if path in self._answered:
            return
        file, line, column = self.file, 0, 0
        if self.is_override(path):
            file = OVERRIDE
        else:
            line, column = self.position(path, at_value=at_value, offset=offset)
        problem = Problem(severity, dotted(path), message, remedy, file, line, column, code=code)
        if problem not in self.problems:
            self.problems.append(problem)

    def is_override(self, path: Path) -> bool:
        """True if ``--set`` gave the member or created it as a parent."""
        if any(path[: len(prefix)] == prefix for prefix in self.overridden):
            return True
        around = any(prefix[: len(path)] == path for prefix in self.overridden)
        return around and bool(path) and inside(self.document.root, path) is None

    error = partialmethod(add, "error")
    warning = partialmethod(add, "warning")
    note = partialmethod(add, "note")

    def resolve(self, path: Path, value: Any, reason: str) -> None:
        """Records that ``"auto"`` at ``path`` became ``value``."""
        self.resolved.append(Resolved(path, value, reason))
        self.note(path, f'"auto" is {show(value)}: {reason}', code="auto", at_value=True)

    def position(self, path: Path, *, at_value: bool = False, offset: int | None = None) -> tuple[int, int]:
        """Returns line and column of the member at ``path`` or its nearest parent; (0, 0) if there is none."""
        spans = self.document.spans
        for length in range(len(path), 0, -1):
            if offset is None and (span := spans.get(path[:length])):
                offset = span.start if at_value and length == len(path) else span.key_start
        if offset is None and not path and path in spans:
            offset = spans[path].start
        return (0, 0) if offset is None else self.document.position(offset)

    def fails(self, path: str | Path) -> bool:
        """True if an error at or below ``path`` is reported already."""
        text = dotted(self.written(keys(path)))
        inner = (f"{text}.", f"{text}[")
        errors = (problem.path for problem in self.problems if problem.severity == "error")
        return any(path == text or path.startswith(inner) for path in errors)

    def sorted(self) -> tuple[Problem, ...]:
        """Returns all problems in file order; those without a position last."""
        rank = ("error", "warning", "note").index
        return tuple(sorted(self.problems, key=lambda p: (p.line == 0, p.line, p.column, rank(p.severity))))

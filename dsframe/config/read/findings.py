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
"""The file name of problems with overrides."""


class Resolved(NamedTuple):
    """A value that was ``"auto"`` or follows from others, and why it is what it is."""

    path: Path
    value: Any
    reason: str
    was: Any = AUTO
    """What the file says."""
    detail: str = ""
    """The part of the reason that is this value's own."""


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
    """Problems and resolved values of one file. A path is a tuple, or dotted text where no key has a dot."""

    def __init__(self, document: Document, file: str, overridden: Iterable[Path] = ()) -> None:
        self.document = document
        self.file = file
        self.overridden = set(overridden)
        self.problems: list[Problem] = []
        self.resolved: list[Resolved] = []
        self.pending: set[Path] = set()
        """Members that wait for the model or the data, as "auto" does."""
        self._moved: dict[Path, Path] = {}
        self._answered: set[Path] = set()

    def empty_copy(self) -> Findings:
        """The same file's, without any problem yet."""
        copy = Findings(self.document, self.file, self.overridden)
        copy._moved, copy._answered = self._moved, self._answered
        return copy

    def moved(self, old: Path, new: Path) -> None:
        """Remember that what the file has at ``old`` is handled as if it stood at ``new``."""
        self._moved[new] = self.written(old)

    def answered(self, path: Path) -> None:
        """Remember that one message about a member of the file is enough, though its value is used."""
        self._answered.add(path)

    def written(self, path: Path) -> Path:
        """The path in the file of what is handled at ``path``."""
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
        """Report one finding about the member handled at ``path``."""
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
        """True if ``--set`` gave the member, or made it around what it gave."""
        if any(path[: len(prefix)] == prefix for prefix in self.overridden):
            return True
        around = any(prefix[: len(path)] == path for prefix in self.overridden)
        return around and bool(path) and inside(self.document.root, path) is None

    error = partialmethod(add, "error")
    warning = partialmethod(add, "warning")
    note = partialmethod(add, "note")

    def resolve(self, path: Path, value: Any, reason: str) -> None:
        """Record that ``"auto"`` at ``path`` became ``value``."""
        self.resolved.append(Resolved(path, value, reason))
        self.note(path, f'"auto" is {show(value)}: {reason}', code="auto", at_value=True)

    def position(self, path: Path, *, at_value: bool = False, offset: int | None = None) -> tuple[int, int]:
        """Line and column of the member at ``path``, else of the nearest one around it; (0, 0) where there is none."""
        spans = self.document.spans
        for length in range(len(path), 0, -1):
            if offset is None and (span := spans.get(path[:length])):
                offset = span.start if at_value and length == len(path) else span.key_start
        if offset is None and not path and path in spans:
            offset = spans[path].start
        return (0, 0) if offset is None else self.document.position(offset)

    def mentions(self, path: str) -> bool:
        """True if something is already reported about ``path``, dotted."""
        return any(problem.path == path for problem in self.problems)

    def fails(self, path: str | Path) -> bool:
        """True if an error is already reported at or under ``path``."""
        text = dotted(self.written(keys(path)))
        inner = (f"{text}.", f"{text}[")
        errors = (problem.path for problem in self.problems if problem.severity == "error")
        return any(path == text or path.startswith(inner) for path in errors)

    def sorted(self) -> tuple[Problem, ...]:
        """All problems in the order of the file; those without a position last."""
        rank = ("error", "warning", "note").index
        return tuple(sorted(self.problems, key=lambda p: (p.line == 0, p.line, p.column, rank(p.severity))))

"""Formatting of numbers, tables and messages."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

Say = Callable[[str], None]
"""Prints one line of progress, on the first process only."""
Json = dict[str, Any]
"""A JSON object."""
_LABEL = re.compile(r"(?<![^ ])(error|warning|note):")
_METRICS = re.compile(r"^(evaluation after step|dsframe: done)")
_COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[33m", "note": "\x1b[36m", "metrics": "\x1b[1m"}
_PLAIN = "\x1b[0m"
_INDENT = 14
"""Column where the values of labelled lines begin."""


def without_nonfinite(value: Any) -> Any:
    """Returns ``value`` with None for non-finite numbers, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mebibytes(count: int) -> str:
    """Formats bytes as ``512 MiB``, ``1.5 GiB``."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def clock(seconds: float) -> str:
    """Formats ``75`` as ``1:15``, ``3700`` as ``1:01:40``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Returns a line for each row; the first ``left`` columns are aligned to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.ljust(w) if at < left else cell.rjust(w) for at, (cell, w) in enumerate(cells)).rstrip()

    return [line(row) for row in rows]


def keys(value: Any, path: str = "") -> dict[str, str]:
    """Flattens the sections of a file to dotted keys, ``zero_optimization.stage``, with their values as JSON."""
    if not isinstance(value, Mapping):
        return {path: json.dumps(value)}
    return {name: text for key, part in value.items() for name, text in keys(part, f"{path}.{key}".lstrip(".")).items()}


def one_line(error: BaseException) -> str:
    """Returns the text of an exception in one line."""
    return " ".join(str(error).split())


def reason(error: BaseException, most: int | None = None) -> str:
    """Returns class and text of an exception in one line, of at most ``most`` characters."""
    return f"{type(error).__name__}: {one_line(error)}"[:most]


def table_of(module: str) -> Any:
    """Returns the content of the JSON file next to a module, given its ``__file__``."""
    return json.loads(Path(module).with_suffix(".json").read_text(encoding="utf-8"))


def has_colours(stream: TextIO) -> bool:
    """True if output there should have colours: a terminal, without NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shown(text: str, stream: TextIO) -> str:
    """Formats ``text`` for a terminal: wrapped at words, labels in colour. Unchanged for files and pipes."""
    if not stream.isatty():
        return text
    width, coloured = shutil.get_terminal_size().columns, has_colours(stream)
    return "\n".join(_shown(line, width, coloured) for line in text.split("\n"))


def _shown(line: str, width: int, coloured: bool) -> str:
    if len(re.sub(r"\x1b\[[0-9;]*m", "", line)) > width:
        indent = " " * (_INDENT if line.startswith("  ") else 2)
        form = textwrap.TextWrapper(
            width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
            replace_whitespace=False,
        )  # fmt: skip
        line = form.fill(line)
    if coloured and _METRICS.match(line):
        return f"{_COLOURS['metrics']}{line}{_PLAIN}"
    return _LABEL.sub(lambda match: f"{_COLOURS[match[1]]}{match[0]}{_PLAIN}", line, count=1) if coloured else line

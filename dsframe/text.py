"""How numbers and tables read, wherever dsframe prints them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def amount(value: float, digits: int = 4) -> str:
    """``1.5e9`` as ``1.5 G``, for a unit to follow."""
    if value < 1000:
        return f"{value:.3g} "
    power = min(int(math.log10(value)) // 3, 6)
    return f"{value / 1000**power:.{digits}g} {' kMGTPE'[power]}"


def mebibytes(count: int) -> str:
    """Bytes as ``512 MiB``, ``1.5 GiB``."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def clock(seconds: float) -> str:
    """``75`` as ``1:15``, ``3700`` as ``1:01:40``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """A line for each row; the first ``left`` columns are aligned to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.ljust(w) if at < left else cell.rjust(w) for at, (cell, w) in enumerate(cells)).rstrip()

    return [line(row) for row in rows]


def reason(error: BaseException, most: int | None = None) -> str:
    """Returns class and text of an exception in one line, of ``most`` characters at most."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


def printable(text: str) -> str:
    """``text`` with a mark for each control character: names out of files must not move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)

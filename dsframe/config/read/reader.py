"""Reads JSON with comments, trailing commas and unquoted keys, as DeepSpeed does, and records positions.

The result is that of the package ``hjson`` 3.1, which DeepSpeed uses. HJSON's unquoted text, which runs to the end of
the line including commas, is refused. Every duplicate key is reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import Any, NamedTuple

Path = tuple[str | int, ...]
"""Keys and list indices from the top to a value."""

Raw = dict[str, Any]
"""An object of a file, as parsed."""

MAX_DEPTH = 64
"""Maximum nesting depth, so that a deep file gives a message and not a stack overflow."""

NOT_JSON = {
    "True": "write true", "False": "write false", "None": "write null",
    "Infinity": "JSON has no infinity: write a large number", "-Infinity": "JSON has no infinity: write a number",
    "inf": "JSON has no infinity: write a large number", "NaN": "write a number", "nan": "write a number",
}  # fmt: skip
"""Words of Python that people write -> what to write."""

_BYTE_ORDER_MARK = "\ufeff"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_SKIP = re.compile(r"(?:[ \t\r\n]+|\#[^\r\n]*|//[^\r\n]*|/\*(?:[^*]|\*(?!/))*\*/)*")
_LINE = re.compile(r"[^\r\n]*")
_KEY = re.compile(r"[^:{}\[\], \t\r\n]+")
_QUOTED = re.compile(r"""(["'])((?:[^"'\\\x00-\x1f]+|\\.|(?!\1)["'])*)(\1?)""")
_ESCAPE = re.compile(r"""\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|(')|.)|\"""")
_ENDS = re.compile(r"[ \t]*(?=[,}\]#\r\n]|//|/\*|$)")
"""What may follow a number or a word on its line."""
_WORDS = {"null": None, "true": True, "false": False}


class Span(NamedTuple):
    """Offsets of one member in the text. For the top level and list items the key is empty and lies at the value."""

    key_start: int
    key_end: int
    start: int
    end: int


class ReadError(Exception):
    """The text is not HJSON. ``message`` and ``remedy`` are for the user, ``offset`` is the position."""

    def __init__(self, message: str, offset: int, remedy: str = "") -> None:
        super().__init__(message)
        self.message, self.offset, self.remedy = message, offset, remedy


@dataclass(frozen=True, eq=False, repr=False)
class Document:
    """A parsed file."""

    text: str
    root: Any
    """Plain dictionaries, lists and values. The last of duplicate keys wins."""
    spans: dict[Path, Span]
    """Offsets of each member."""
    duplicates: Sequence[tuple[Path, int, int]] = ()
    """Path, offset of the repeated key, and offset of the key it repeats."""

    def position(self, offset: int) -> tuple[int, int]:
        """Returns line and column of an offset, both from 1; the column counts characters."""
        line = self.text.count("\n", 0, offset) + 1
        return line, offset - (self.text.rfind("\n", 0, offset) + 1) + 1


def read(text: str) -> Document:
    """Parses ``text``.

    Raises:
        ReadError: it is not HJSON.
    """
    return _Reader(text).document()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.spans: dict[Path, Span] = {}
        self.duplicates: list[tuple[Path, int, int]] = []

    def document(self) -> Document:
        start = self.skip(len(self.text) - len(self.text.lstrip(_BYTE_ORDER_MARK)))
        if self.at(start) not in ("{", "["):
            raise ReadError(f"expected an object, found {self.snippet(start)}", start, "put the keys into {...}")
        root, end = self.value(start, ())
        end = self.skip(end)
        if end != len(self.text):
            message = f"text after the end of the file's object: {self.snippet(end)}"
            raise ReadError(message, end, "check the brackets")
        self.spans[()] = Span(start, start, start, end)
        return Document(self.text, root, self.spans, tuple(self.duplicates))

    def at(self, offset: int) -> str:
        """Returns the character at an offset; empty at the end."""
        return self.text[offset : offset + 1]

    def snippet(self, offset: int) -> str:
        return repr(self.line(offset)[:20]) if self.at(offset) else "the end of the file"

    def line(self, offset: int) -> str:
        match = _LINE.match(self.text, offset)
        return match[0] if match else ""

    def skip(self, offset: int) -> int:
        """Returns the offset after blanks and comments."""
        match = _SKIP.match(self.text, offset)
        offset = match.end() if match else offset
        if self.text.startswith("/*", offset):
            raise ReadError("comment without an end", offset, "close it with */")
        return offset

    def value(self, offset: int, path: Path) -> tuple[Any, int]:
        if len(path) > MAX_DEPTH:
            raise ReadError(f"nested more than {MAX_DEPTH} levels deep", offset)
        first = self.at(offset)
        if first == "{":
            return self.members(offset + 1, path, closing="}")
        if first == "[":
            items, end = self.members(offset + 1, path, closing="]")
            return list(items.values()), end
        return self.quoted(offset) if first in ('"', "'") and first else self.unquoted(offset)

    def members(self, offset: int, path: Path, closing: str) -> tuple[dict[Any, Any], int]:
        """Returns the members of an object, or the items of a list by index."""
        result: dict[Any, Any] = {}
        opened, offset = offset - 1, self.skip(offset)
        while (first := self.at(offset)) != closing:
            if not first:
                raise ReadError(f'"{self.at(opened)}" is never closed', opened, f"add the missing {closing}")
            key: Any = len(result)
            key_end = start = offset
            if closing != "]":
                key, key_end = self.key(offset)
                colon = self.skip(key_end)
                if self.at(colon) != ":":
                    message = f"expected ':' after the key, found {self.snippet(colon)}"
                    raise ReadError(message, colon, "check quotes and commas")
                start = self.skip(colon + 1)
            member_path = (*path, key)
            if key in result:
                self.duplicates.append((member_path, offset, self.spans[member_path].key_start))
                self.spans = {
                    inner: span for inner, span in self.spans.items() if inner[: len(member_path)] != member_path
                }
            result[key], end = self.value(start, member_path)
            self.spans[member_path] = Span(offset, key_end, start, end)
            offset = self.skip(end)
            if self.at(offset) == ",":
                offset = self.skip(offset + 1)
        return result, offset + len(closing)

    def key(self, offset: int) -> tuple[str, int]:
        if self.at(offset) in ('"', "'"):
            return self.quoted(offset)
        match = _KEY.match(self.text, offset)
        if match is None:
            message = f"expected a key and ':', found {self.snippet(offset)}"
            raise ReadError(message, offset, "check quotes and commas")
        return match[0], match.end()

    def quoted(self, offset: int) -> tuple[str, int]:
        match = _QUOTED.match(self.text, offset)
        assert match is not None
        end = match.end()
        if not match[3]:
            if self.at(end) in ("", "\r", "\n", "\\"):
                raise ReadError(f"text without a closing {match[1]}", offset, f"add the missing {match[1]}")
            message = f"control character {self.at(end)!r} inside quotes"
            raise ReadError(message, end, "write it as an escape such as \\t")

        def as_json(escape: re.Match[str]) -> str:
            if escape[0] == '"':
                return '\\"'
            if not (escape[1] or escape[2]):
                message = f"unknown escape {escape[0]!r}"
                raise ReadError(message, offset + 1 + escape.start(), 'write a backslash as "\\\\"')
            return escape[2] or escape[0]

        text: str = json.loads(f'"{_ESCAPE.sub(as_json, match[2])}"')
        return text, end

    def unquoted(self, offset: int) -> tuple[Any, int]:
        number = _NUMBER.match(self.text, offset)
        if number and _ENDS.match(self.text, number.end()):
            return self.number(number), number.end()
        for word, value in _WORDS.items():
            if self.text.startswith(word, offset) and _ENDS.match(self.text, offset + len(word)):
                return value, offset + len(word)
        if self.at(offset) in ("", *"{}[],:"):
            raise ReadError(f"expected a value, found {self.snippet(offset)}", offset)
        bare = re.split(r"[\s,}\]]", self.line(offset))[0]
        remedy = NOT_JSON.get(bare, "quote it, or write a number, true, false or null")
        raise ReadError(f"{bare} without quotes is text", offset, remedy)

    def number(self, match: re.Match[str]) -> int | float:
        try:
            if match[1] is None and match[2] is None:
                return int(match[0])
            value = float(match[0])
            # hjson turns integral floats into integers, and so do people who write 5e8.
            is_integral = abs(value) < 1e10 or isinf(value)
            return int(value) if is_integral and value == int(value) else value
        except (ValueError, OverflowError):
            raise ReadError(f"the number {match[0][:20]}... is too large", match.start()) from None


def keys(path: str | Path) -> Path:
    """Returns the keys of a dotted path."""
    return tuple(path.split(".")) if isinstance(path, str) and path else tuple(path)


def inside(value: Any, path: Sequence[str | int]) -> Any:
    """Returns the value at ``path`` below ``value``; None if there is none."""
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        else:
            value = value[part] if isinstance(value, list) and isinstance(part, int) and part < len(value) else None
    return value


def number_of(text: str) -> int | float | None:
    """Returns the number that ``text`` spells, or None."""
    match = _NUMBER.fullmatch(text.strip())
    value = float(match[0]) if match else inf
    return None if isinf(value) else int(value) if value == int(value) else value


def value_of(text: str) -> Any:
    """Returns the value of ``text`` as JSON, else the text itself."""

    def reject(constant: str) -> Any:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=reject)
    except (ValueError, RecursionError):
        return text

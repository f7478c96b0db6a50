"""Reads what DeepSpeed reads (HJSON: JSON with comments, trailing commas and optional quotes) and remembers each place.

The grammar is that of the package ``hjson`` 3.1, which DeepSpeed parses its file with, down to the details that
surprise: text without quotes runs to the end of the line, commas included. Unlike it, this reader reports every
duplicate key with its place, and does not need the package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Path = tuple[str | int, ...]
"""Keys and list indices from the top to a value."""

MAX_DEPTH = 64
"""No configuration is nested deeper; a limit turns a stack overflow into a message."""

NOT_JSON = {
    "True": "write true", "False": "write false", "None": "write null",
    "Infinity": "JSON has no infinity: write a large number", "-Infinity": "JSON has no infinity: write a number",
    "inf": "JSON has no infinity: write a large number", "NaN": "write a number", "nan": "write a number",
}  # fmt: skip
"""Words of Python that people write -> what to write."""

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_SKIP = re.compile(r"(?:[ \t\r\n]+|\#[^\r\n]*|//[^\r\n]*|/\*(?:[^*]|\*(?!/))*\*/)+")
_BARE_END = re.compile(r"[\r\n]|$")
_PLAIN = re.compile(r"""[^'"\\\x00-\x1f]*""")
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WORDS = {"null": None, "true": True, "false": False}


class Span(NamedTuple):
    """Offsets of one member in the text. For the top and for list items the key is empty and lies at the value."""

    key_start: int
    key_end: int
    start: int
    end: int


class ReadError(Exception):
    """The text is not HJSON. ``message`` and ``remedy`` are for the user, ``offset`` is the place."""

    def __init__(self, message: str, offset: int, remedy: str = "") -> None:
        super().__init__(message)
        self.message, self.offset, self.remedy = message, offset, remedy


@dataclass(frozen=True, eq=False, repr=False)
class Document:
    """A parsed file."""

    text: str
    root: Any
    """Plain dictionaries, lists and values. Of duplicate keys the last one counts."""
    spans: dict[Path, Span]
    """Where each member stands."""
    duplicates: Sequence[tuple[Path, int, int]] = ()
    """Path, offset of the repeated key, and offset of the key it repeats."""
    bare: frozenset[Path] = frozenset()
    """Members whose value is text without quotes."""

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both from 1, the column in characters."""
        line = self.text.count("\n", 0, offset) + 1
        return line, offset - (self.text.rfind("\n", 0, offset) + 1) + 1


def read(text: str) -> Document:
    """Parse ``text``.

    Raises:
        ReadError: it is not HJSON.
    """
    return _Reader(text).document()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.spans: dict[Path, Span] = {}
        self.duplicates: list[tuple[Path, int, int]] = []
        self.bare: dict[Path, int] = {}

    def document(self) -> Document:
        start = self.skip(1 if self.text.startswith("\ufeff") else 0)
        if start == len(self.text):
            root: Any = {}
            end = start
        elif self.text[start] in "{[":
            root, end = self.value(start, ())
        else:
            root, end = self.members(start, (), closing="")
        rest = self.skip(end)
        if rest != len(self.text):
            raise ReadError(
                f"text after the end of the file's object: {self.snippet(rest)}", rest, "check the brackets"
            )
        self.spans[()] = Span(start, start, start, end)
        return Document(self.text, root, self.spans, tuple(self.duplicates), frozenset(self.bare))

    def snippet(self, offset: int) -> str:
        return repr(self.text[offset : offset + 20].split("\n")[0].rstrip("\r"))

    def skip(self, offset: int) -> int:
        """The offset after blanks and comments."""
        match = _SKIP.match(self.text, offset)
        offset = match.end() if match else offset
        if self.text.startswith("/*", offset):
            raise ReadError("comment without an end", offset, "close it with */")
        return offset

    def value(self, offset: int, path: Path) -> tuple[Any, int]:
        if len(path) > MAX_DEPTH:
            raise ReadError(f"nested more than {MAX_DEPTH} levels deep", offset)
        text = self.text
        first = text[offset : offset + 1]
        if first == "{":
            return self.members(offset + 1, path, closing="}")
        if first == "[":
            return self.items(offset, path)
        if text.startswith("'''", offset):
            return self.multiline(offset)
        if first in ('"', "'"):
            return self.quoted(offset)
        return self.unquoted(offset, path)

    def members(self, offset: int, path: Path, closing: str) -> tuple[dict[str, Any], int]:
        result: dict[str, Any] = {}
        opened = offset - 1
        offset = self.skip(offset)
        while True:
            first = self.text[offset : offset + 1]
            if first == closing:
                return result, offset + len(closing)
            if not first:
                raise self.unclosed("{", "}", opened)
            key, key_end = self.key(offset)
            colon = self.skip(key_end)
            if self.text[colon : colon + 1] != ":":
                raise ReadError(f"expected ':' after the key, found {self.snippet(colon)}", colon)
            start = self.skip(colon + 1)
            here = (*path, key)
            if key in result:
                self.duplicates.append((here, offset, self.spans[here].key_start))
                self.forget(here)
            value, end = self.value(start, here)
            result[key] = value
            self.spans[here] = Span(offset, key_end, start, end)
            offset = self.skip(end)
            if self.text[offset : offset + 1] == ",":
                offset = self.skip(offset + 1)

    def unclosed(self, bracket: str, closing: str, opened: int) -> ReadError:
        """Returns what to say at the end of the file: often text without quotes has swallowed the bracket."""
        for offset in self.bare.values():
            line = self.text[offset:].partition("\n")[0].strip()
            if any(character in line for character in "}],"):
                word = re.split(r"[\s,}\]]", line)[0]
                return ReadError(
                    f"{word} without quotes is text to the end of the line, brackets included",
                    offset,
                    NOT_JSON.get(word, "quote it, or write a number, true, false or null"),
                )
        return ReadError(f'"{bracket}" is never closed', opened, f"add the missing {closing}")

    def forget(self, path: Path) -> None:
        for inner in [inner for inner in self.spans if inner[: len(path)] == path]:
            del self.spans[inner]

    def items(self, opened: int, path: Path) -> tuple[list[Any], int]:
        result: list[Any] = []
        offset = self.skip(opened + 1)
        while True:
            first = self.text[offset : offset + 1]
            if first == "]":
                return result, offset + 1
            if not first:
                raise self.unclosed("[", "]", opened)
            here = (*path, len(result))
            value, end = self.value(offset, here)
            result.append(value)
            self.spans[here] = Span(offset, offset, offset, end)
            offset = self.skip(end)
            if self.text[offset : offset + 1] == ",":
                offset = self.skip(offset + 1)

    def key(self, offset: int) -> tuple[str, int]:
        if self.text[offset] in "\"'":
            return self.quoted(offset)
        end = offset
        while end < len(self.text) and self.text[end] not in ":{}[], \t\r\n":
            end += 1
        colon = self.skip(end) if end < len(self.text) and self.text[end] in " \t\r\n" else end
        if end == offset or self.text[colon : colon + 1] != ":":
            raise ReadError(f"expected a key and ':', found {self.snippet(offset)}", offset, "check quotes and commas")
        return self.text[offset:end], end

    def quoted(self, offset: int) -> tuple[str, int]:
        text, quote, parts, position = self.text, self.text[offset], [""], offset + 1
        while True:
            plain = _PLAIN.match(text, position)
            end = plain.end() if plain else position
            parts.append(text[position:end])
            stop = text[end : end + 1]
            if stop == quote:
                return "".join(parts), end + 1
            if not stop or stop in "\r\n":
                raise ReadError(f"text without a closing {quote}", offset, f"add the missing {quote}")
            if stop == "\\":
                part, position = self.escape(end + 1)
                parts.append(part)
            elif stop in "\"'":
                parts.append(stop)
                position = end + 1
            else:
                raise ReadError(f"control character {stop!r} inside quotes", end, "write it as an escape such as \\t")

    def escape(self, offset: int) -> tuple[str, int]:
        letter = self.text[offset : offset + 1]
        if letter in _ESCAPES:
            return _ESCAPES[letter], offset + 1
        code = self.text[offset + 1 : offset + 5]
        # hjson asks Python's int(), which takes "ce_b" for 0xceb: as DeepSpeed reads it, so do we, and the key is then unknown.
        if letter == "u" and re.fullmatch("[0-9a-fA-F](?:_?[0-9a-fA-F]){1,3}", code) and len(code) == 4:
            number, end = int(code, 16), offset + 5
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.text, end)
            if 0xD800 <= number < 0xDC00 and low:
                return chr(0x10000 + ((number - 0xD800) << 10 | int(low[1], 16) - 0xDC00)), low.end()
            return chr(number), end
        raise ReadError(
            f"unknown escape {self.text[offset - 1 : offset + 1]!r}", offset - 1, 'write a backslash as "\\\\"'
        )

    def multiline(self, offset: int) -> tuple[str, int]:
        end = self.text.find("'''", offset + 3)
        if end < 0:
            raise ReadError("text without a closing '''", offset)
        indent = offset - (self.text.rfind("\n", 0, offset) + 1)
        lines = self.text[offset + 3 : end].replace("\r", "").lstrip(" \t").split("\n")
        if not lines[0]:
            lines = lines[1:] or [""]
            lines[0] = _dedent(lines[0], indent)
        body = [lines[0], *(_dedent(line, indent) for line in lines[1:])]
        return "\n".join(body[:-1] if len(body) > 1 and not body[-1] else body), end + 3

    def unquoted(self, offset: int, path: Path) -> tuple[Any, int]:
        text = self.text
        if offset == len(text) or text[offset] in "{}[],:":
            found = self.snippet(offset) if offset < len(text) else "the end of the file"
            raise ReadError(f"expected a value, found {found}", offset)
        number = _NUMBER.match(text, offset)
        if number:
            end = number.end()
            if self.ends(end):
                return self.number(number), end
        for word, value in _WORDS.items():
            if text.startswith(word, offset) and self.ends(offset + len(word)):
                return value, offset + len(word)
        stop = _BARE_END.search(text, offset)
        end = stop.start() if stop else len(text)
        bare = text[offset:end].strip()
        self.bare[path] = offset
        return bare, offset + len(bare)

    def ends(self, offset: int) -> bool:
        """True if a number or word may end here: what follows on the line is a delimiter or a comment."""
        rest = re.compile(r"[ \t]*(?=[,}\]#\r\n]|//|/\*|$)")
        return rest.match(self.text, offset) is not None

    def number(self, match: re.Match[str]) -> int | float:
        try:
            if match[1] is None and match[2] is None:
                return int(match[0])
            value = float(match[0])
            if value in (float("inf"), float("-inf")):
                raise OverflowError
            # hjson makes integers of integral floats, and so do people who write 5e8.
            return int(value) if abs(value) < 1e10 and value == int(value) else value
        except (ValueError, OverflowError):
            raise ReadError(f"the number {match[0][:20]}... is too large", match.start()) from None


def _dedent(line: str, indent: int) -> str:
    blanks = len(line) - len(line.lstrip(" \t"))
    return line[min(blanks, indent) :]


def inside(value: Any, path: Path) -> Any:
    """Returns the value at ``path`` below ``value``; None where there is none."""
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        else:
            value = value[part] if isinstance(value, list) and isinstance(part, int) and part < len(value) else None
    return value


def skip_blanks(text: str, offset: int) -> int:
    """The offset after blanks and comments."""
    match = _SKIP.match(text, offset)
    return match.end() if match else offset


def number_of(text: str) -> int | float | None:
    """The number that ``text`` spells, or None."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    value = float(match[0])
    if value in (float("inf"), float("-inf")):
        return None
    return int(value) if value == int(value) else value

"""``dsframe check --fix``: edits the text of a file, one finding at a time, and keeps comments and order.

Every edit is checked: read again, the file must mean what it was taken to mean before, or the edit is dropped.
"""

from __future__ import annotations

import difflib
import json
import re

from dsframe.config.load import Examined, examine
from dsframe.config.read.findings import Fix
from dsframe.config.read.reader import Document, Path, skip_blanks

MAX_EDITS = 200

_COMMENTED = re.compile(r"#|//|/\*|'''")
"""What may make it matter where a line ends."""


def fix(text: str, name: str) -> tuple[str, str]:
    """The corrected text, and the changes as a unified diff: both as given and empty when there is nothing to do."""
    original = text
    examined = examine(text, name)
    refused: set[tuple[Path, Path]] = set()
    for _ in range(MAX_EDITS):
        edited = _next(examined, refused, name)
        if edited is None:
            break
        text, examined = edited
    difference = "".join(
        difflib.unified_diff(_lines(original), _lines(text), f"{name} (as it is)", f"{name} (fixed)", n=2)
    )
    return text, difference


def _lines(text: str) -> list[str]:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return lines


def _next(examined: Examined, refused: set[tuple[Path, Path]], name: str) -> tuple[str, Examined] | None:
    """The text after the first edit that holds."""
    document, config = examined.document, examined.config
    if document is None or config is None:
        return None
    meaning = config.written()
    for edit in examined.fixes:
        key = (edit.path, edit.target)
        if key in refused or edit.path not in document.spans:
            continue
        text = _Editor(document).apply(edit)
        after = examine(text, name) if text is not None else None
        if text is None or after is None or after.config is None or after.config.written() != meaning:
            refused.add(key)
            continue
        if sum(p.severity == "error" for p in after.problems) > sum(p.severity == "error" for p in examined.problems):
            refused.add(key)
            continue
        return text, after
    return None


class _Editor:
    def __init__(self, document: Document) -> None:
        self.document, self.text, self.spans = document, document.text, document.spans

    def apply(self, edit: Fix) -> str | None:
        """The text after one edit, or None where it cannot be made."""
        span = self.spans[edit.path]
        if edit.path in self.document.bare and not edit.replace:
            return None  # text without quotes runs to the end of its line, and so would what follows
        if edit.remove:
            return self.without(edit.path, self.text)
        value = json.dumps(edit.value) if edit.replace else self.text[span.start : span.end]
        if edit.target == edit.path:
            return self.text[: span.start] + value + self.text[span.end :]
        member = json.dumps(edit.target[-1]) + self.text[span.key_end : span.start] + value
        above = edit.target[:-1]
        if above != edit.path[:-1]:
            if above in self.spans or not above:
                return self.inserted(edit.path, above, member)
            depth = len(edit.path) - 1
            if edit.path[:-1] != above[:depth] or above[: depth + 1] in self.spans:
                return None
            for part in reversed(above[depth:]):  # the section is not there yet: it gets one here
                member = f"{json.dumps(part)}: {{{member}}}"
        return self.text[: span.key_start] + member + self.text[span.end :]

    def inserted(self, path: Path, section: Path, member: str) -> str | None:
        """The text with the member of ``path`` taken out and put first into the object ``section``."""
        target, removed = self.spans[section], self.spans[path]
        if self.text[target.start : target.start + 1] != "{":
            return None
        inside = [
            span.key_start for other, span in self.spans.items() if other[:-1] == section and other and other != path
        ]
        start = min(inside, default=target.start + 1)
        lines = self.text.rfind("\n", target.start, start)
        indent = self.text[lines + 1 : start] if lines >= 0 else ""
        if indent.strip():
            indent, lines = "", -1
        separator = f",\n{indent}" if lines >= 0 else ", "
        addition = self.indented(path, member, indent) + (separator if inside else "")
        if start > removed.key_start:
            return self.without(path, self.text[:start] + addition + self.text[start:])
        text = self.without(path, self.text)
        return None if text is None else text[:start] + addition + text[start:]

    def indented(self, path: Path, member: str, indent: str) -> str:
        """A member of several lines, shifted to its new depth."""
        start = self.text.rfind("\n", 0, self.spans[path].key_start) + 1
        before = self.text[start : self.spans[path].key_start]
        if not indent and not _COMMENTED.search(member):
            closed = re.sub(r"(?<=[{\[])\s*\n\s*|\s*\n\s*(?=[}\]])", "", member)
            return re.sub(r"\s*\n\s*", " ", closed)
        return member.replace(f"\n{before}", f"\n{indent}")

    def without(self, path: Path, text: str) -> str | None:
        """``text`` (equal to the document's up to and behind the member) without the member."""
        span = self.spans[path]
        end = skip_blanks(text, span.end)
        start, stop = span.key_start, span.end
        if text[end : end + 1] == ",":
            stop = end + 1
        else:
            before = [
                s for p, s in self.spans.items() if len(p) == len(path) and p[:-1] == path[:-1] and s.end <= start
            ]
            if before:
                comma = skip_blanks(text, max(s.end for s in before))
                if text[comma : comma + 1] == "," and comma < start:
                    text = text[:comma] + text[comma + 1 :]
                    start, stop = start - 1, stop - 1
        line = text.rfind("\n", 0, start) + 1
        close = text.find("\n", stop)
        close = len(text) if close < 0 else close
        if not text[line:start].strip() and not text[stop:close].strip():
            return text[:line] + text[close + 1 :]
        if text[stop : stop + 1] == " ":
            stop += 1
        return text[:start] + text[stop:]

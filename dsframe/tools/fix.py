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
            return None  # text without quotes runs to the end of its line: moving it could swallow something
        if edit.remove:
            return self.without(edit.path, self.text)
        value = json.dumps(edit.value) if edit.replace else self.text[span.start : span.end]
        between = self.text[span.key_end : span.start]
        member = json.dumps(edit.target[-1]) + between + value
        if edit.target[:-1] == edit.path[:-1]:
            if edit.target == edit.path:
                return self.text[: span.start] + value + self.text[span.end :]
            return self.text[: span.key_start] + member + self.text[span.end :]
        return self.moved(edit, member)

    def moved(self, edit: Fix, member: str) -> str | None:
        span, home = self.spans[edit.path], edit.target[:-1]
        if home in self.spans or not home:
            return self.inserted(edit.path, home, member)
        if edit.path[:-1] == home[: len(edit.path) - 1] and self.document.spans.get(home[: len(edit.path)]) is None:
            # The section is not there yet: wrap the member where it stands.
            for part in reversed(home[len(edit.path) - 1 :]):
                member = f"{json.dumps(part)}: {{{member}}}"
            return self.text[: span.key_start] + member + self.text[span.end :]
        return None

    def inserted(self, path: Path, home: Path, member: str) -> str | None:
        """The text with a member taken out at ``path`` and put at the end of the object ``home``."""
        target = self.spans[home]
        end = target.end - 1
        if self.text[end : end + 1] != "}":
            return None
        inside = [s for p, s in self.spans.items() if len(p) == len(home) + 1 and p[: len(home)] == home and p != path]
        removed = self.spans[path]
        if not inside:
            place, addition = target.start + 1, member
        else:
            last = max(inside, key=lambda s: s.end)
            bare = any(self.spans[p].end == last.end for p in self.document.bare)
            comma = skip_blanks(self.text, last.end)
            has_comma = self.text[comma : comma + 1] == ","
            start = self.text.rfind("\n", 0, last.key_start) + 1
            indent = self.text[start : last.key_start]
            own_line = not indent.strip() and "\n" in self.text[target.start : target.end]
            separator = f"\n{indent}" if own_line else " "
            if bare and not own_line:
                return None
            place = comma + 1 if has_comma else last.end
            addition = (
                ("" if has_comma or bare else ",") + separator + self.indented(path, member, indent if own_line else "")
            )
            if has_comma and self.text[skip_blanks(self.text, comma + 1)] == "}":
                addition += ","
        if place > removed.key_start:
            longer = self.text[:place] + addition + self.text[place:]
            return self.without(path, longer)
        without = self.without(path, self.text)
        return None if without is None else without[:place] + addition + without[place:]

    def indented(self, path: Path, member: str, indent: str) -> str:
        """A member of several lines, shifted to its new depth."""
        start = self.text.rfind("\n", 0, self.spans[path].key_start) + 1
        old = self.text[start : self.spans[path].key_start]
        if not indent and not _COMMENTED.search(member):
            closed = re.sub(r"(?<=[{\[])\s*\n\s*|\s*\n\s*(?=[}\]])", "", member)
            return re.sub(r"\s*\n\s*", " ", closed)
        first, *rest = member.split("\n")
        return "\n".join([first, *(indent + line.removeprefix(old) if line.startswith(old) else line for line in rest)])

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

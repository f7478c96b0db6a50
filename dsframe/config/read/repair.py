"""Finds keys that the schema does not know, says what was meant, and continues as if that had been written.

So one misspelled section name is one error, and the mistakes inside the section are reported as well.
"""

from __future__ import annotations

from typing import Any

from dsframe.config.features import MADE_HERE
from dsframe.config.read import foreign
from dsframe.config.read.findings import Findings, dotted, show
from dsframe.config.read.legacy import MEANT, REMOVED, RENAMED, SYNONYMS, modernise
from dsframe.config.read.reader import Path, inside, keys
from dsframe.config.read.suggest import closest, containing
from dsframe.config.schema.base import Epochs, Section
from dsframe.config.schema.file import File, children, places, section_at, shape

_LEGACY = frozenset({*REMOVED, *RENAMED, *SYNONYMS})
_COMMON = frozenset(
    {"enabled", "type", "name", "params", "dtype", "profile", "mode", "model", "model_type", "properties", "title", "seed", "d",
     "shape"}
)  # fmt: skip
"""Keys too common to tell where they belong."""
_NULL: tuple[Any, ...] = (False, None, {})


def is_comment(key: str) -> bool:
    """Keys that people write comments under. At the top level DeepSpeed ignores them."""
    return key.startswith(("_", "//", "#", "$")) or key in ("comment", "comments", "description")


def has_no_known_key(root: dict[str, Any]) -> bool:
    """True if a file has several keys and none that DeepSpeed has, or had, or that is spelled like one of its own."""
    legacy = {name.partition(".")[0] for name in (*_LEGACY, *MEANT)}
    names = [key for key in root if not is_comment(key)]
    if len(names) < 3 or any(key in File.model_fields or key in legacy for key in names):
        return False
    known = places().keys() - _COMMON
    return not any(key in known or closest(key, File.model_fields) for key in names)


def repair(raw: dict[str, Any], findings: Findings) -> frozenset[str]:
    """Rename, move or drop unknown keys of ``raw`` in place, reporting each.

    Returns:
        The dotted names that ``dsframe.pass_through`` lists: dropped from ``raw`` without a report.
    """
    listed = inside(raw, ("dsframe", "pass_through"))
    passed = frozenset(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else frozenset()
    repairs = _Repair(raw, findings, passed)
    # Misspelled names first, so that what is misplaced finds its section. The last pass sees what the one before
    # it moved into a section that it had already left behind.
    for step in (repairs.correct, repairs.drop, repairs.drop):
        repairs.visit(File, raw, (), step)
        modernise(raw, findings)
    return passed


class _Repair:
    def __init__(self, raw: dict[str, Any], findings: Findings, passed: frozenset[str]) -> None:
        self.raw, self.findings, self.passed = raw, findings, passed

    def visit(self, owner: type[Section], raw: dict[str, Any], path: Path, step: Any) -> None:
        for key in list(raw):
            if key not in owner.model_fields and not owner.open:
                step(owner, raw, (*path, key))
        for inner, section, value in list(children(owner, raw)):
            self.visit(section, value, path + inner, step)

    def unknown(self, here: Path, message: str = "unknown key", remedy: str = "remove it") -> None:
        self.findings.error(here, message, remedy, code="unknown-key")

    def correct(self, owner: type[Section], raw: dict[str, Any], here: Path) -> None:
        """Rename a misspelled key. One slip makes it certain; more than one only where the key has no other home."""
        name, key = dotted(here), str(here[-1])
        if name in self.passed or name in _LEGACY or (len(here) == 1 and is_comment(key)):
            return
        legal = [other for other in owner.model_fields if other not in raw]
        place = keys(foreign.target(key) or "")
        meant = MEANT.get(name) or (str(place[-1]) if place and place[:-1] == here[:-1] else None)
        if foreign.answers(key) and meant is None:
            return
        meant = meant or closest(key, legal, 1)
        if meant is None and self.home(key, here, raw[key]) is None:
            meant = closest(key, legal) or self.short_for(owner, here, raw[key])
        if meant in legal:
            self.unknown(here, remedy=f'did you mean "{meant}"?')
            raw[str(meant)] = raw.pop(key)
            self.findings.moved(here, (*here[:-1], str(meant)))

    def drop(self, owner: type[Section], raw: dict[str, Any], here: Path) -> None:
        """Take an unknown key out, and say where it belongs."""
        name, key = dotted(here), str(here[-1])
        value = raw.pop(key)
        if name in self.passed or name == "$schema":
            return
        if issubclass(owner, Epochs):
            self.unknown(here, remedy='write a number of steps, or {"epochs": 1}')
        elif len(here) == 1 and is_comment(key):
            self.findings.note(here, "taken as a comment", code="comment")
        elif name in REMOVED:
            off = value in _NULL or (isinstance(value, dict) and value.get("enabled") is False)
            remedy = "remove it (it is switched off)" if off else REMOVED[name]
            message = "removed from DeepSpeed 0.19, which raises if the key is present"
            self.findings.error(here, message, remedy, code="removed")
        elif name in SYNONYMS:
            self.unknown(here, *SYNONYMS[name])
        elif here[:-1] in ((), ("dsframe",)) and foreign.answers(key):
            self.translate(here, value)
        else:
            self.guess(owner, here, value)

    def translate(self, here: Path, value: Any) -> None:
        """Say what does here what a key of another trainer does there, and continue as if that were written."""
        key = str(here[-1])
        target = foreign.target(key)
        place = keys(target or "")
        if target is None:
            self.unknown(
                here, remedy=foreign.advice(key) or "remove it: dsframe does so by itself, or has nothing like it"
            )
        elif inside(self.raw, place) is not None:
            self.unknown(here, f'another name of "{target}", which the file has as well', "keep one")
        else:
            written = show(value)
            for part in reversed(place[1:]):
                written = f'{{"{part}": {written}}}'
            self.unknown(here, remedy=f'write "{place[0]}": {written}')
            if place[0] != "dsframe" or "dsframe" in self.raw:
                self.move(here, place, value)
        self.findings.answered(here)

    def guess(self, owner: type[Section], here: Path, value: Any) -> None:
        key = str(here[-1])
        home = self.home(key, here, value)
        twin = None
        if home is None:
            twin = closest(key, owner.model_fields, 1) or self.short_for(owner, here, value)
        similar = closest(key, places(), 1) if len(key) > 4 else None
        if twin and self.findings.is_override(here):
            self.unknown(here, remedy=f'did you mean "{twin}"?')
        elif twin:
            self.unknown(here, f'unknown key; it looks like "{twin}", which the file has as well', "keep one")
        elif home is not None:
            self.findings.error(here, f"belongs {_where(home)}", code="misplaced-key")
            self.move(here, (*home, key), value)
        elif is_comment(key):
            message = f"comments as keys are not possible here{': DeepSpeed raises' if owner.coerced else ''}"
            self.unknown(here, message, "write a // comment: DeepSpeed reads HJSON")
        elif similar and (home := self.home(similar, (*here[:-1], similar), value)) is not None:
            self.unknown(here, remedy=f'did you mean "{similar}" {_where(home)}?')
        elif foreign.answers(key):
            self.translate(here, value)
        elif here[0] == "dsframe":
            self.unknown(here)
        else:
            raises = owner.coerced or "params" in here
            forward = f', or pass it on with "dsframe": {{"pass_through": ["{dotted(here)}"]}}'
            remedy = "remove it" + ("" if here[0] in MADE_HERE else forward)
            self.unknown(here, f"unknown key; {'DeepSpeed raises' if raises else 'DeepSpeed ignores it'}", remedy)

    def short_for(self, owner: type[Section], here: Path, value: Any) -> str | None:
        """Returns the only key of ``owner`` that takes such a value and has the key's words, or begins with it."""
        return containing(str(here[-1]), [key for key in owner.model_fields if _fits(here[:-1], key, value)])

    def home(self, key: str, here: Path, value: Any) -> Path | None:
        """Returns the section that a key belongs to: the only one that has it, or the nearest of few. An object goes where
        one is taken, and nothing else does."""
        path = here[:-1]
        if key in _COMMON:
            return None
        # What lies deep in a rare section is a better guess only where the file has that section.
        homes = [
            home
            for home in places().get(key, ())
            if home != path and (len(home) < 3 or home[0] in self.raw) and _fits(home, key, value)
        ]
        if not 1 <= len(homes) <= 3:
            return None
        near = [home for home in homes if path[: len(home)] == home or (path and home[: len(path)] == path)]
        if near:
            return near[0]
        written = [home for home in homes if home and home[0] in self.raw]
        only = written if len(written) == 1 else homes
        # A section of ours adopts a stranger only in a file that has it.
        foreign = only[0][:1] == ("dsframe",) and "dsframe" not in self.raw
        return only[0] if len(only) == 1 and not foreign else None

    def move(self, old: Path, new: Path, value: Any) -> None:
        owner: Any = self.raw
        for index, part in enumerate(new[:-1]):
            if part not in owner and (made := class_at(new[: index + 1])):
                if any(field.is_required() for field in made.model_fields.values()):
                    return  # the section would lack more than this key
                if index:
                    self.findings.moved(old, new[: index + 1])
            owner = owner.setdefault(part, {})
            if not isinstance(owner, dict):
                return
        if new[-1] not in owner:
            owner[new[-1]] = value
            self.findings.moved(old, new)


def _where(home: Path) -> str:
    return f'under "{dotted(home)}"' if home else "at the top level"


def _fits(home: Path, key: str, value: Any) -> bool:
    owner = class_at(home)
    if owner is None or key not in owner.model_fields:
        return not isinstance(value, (dict, list)) or key in ("betas", "milestones")
    expected = shape(owner, key)
    takes_object = bool(expected.kinds & {"dict", "any"})
    return takes_object if isinstance(value, dict) else not expected.section or value is True


def class_at(path: Path) -> type[Section] | None:
    """The section class at a path of the schema."""
    owner: type[Section] | None = File
    for part in path:
        if owner is None or not isinstance(part, str) or part not in owner.model_fields:
            return None
        owner = section_at(owner, part, {})
    return owner

"""Finds keys that the schema does not know, says what was meant, and goes on as if that had been written.

So one misspelled section name is one error, and the mistakes inside the section are reported as well.
"""

from __future__ import annotations

from typing import Any

from dsframe.config.features import MADE_HERE
from dsframe.config.read.findings import Findings, Fix, dotted
from dsframe.config.read.legacy import MEANT, REMOVED, RENAMED, SYNONYMS, modernise
from dsframe.config.read.reader import Path
from dsframe.config.read.suggest import closest, containing
from dsframe.config.schema.base import Epochs, Section
from dsframe.config.schema.file import File, children, places, section_at, shape

_LEGACY = frozenset({*REMOVED, *RENAMED, *SYNONYMS})
_COMMON = frozenset(
    {"enabled", "type", "name", "params", "dtype", "profile", "mode", "model", "model_type", "properties", "title", "seed", "d",
     "shape"}
)  # fmt: skip
"""Keys too common to tell where they belong."""

PASS_THROUGH = 'or pass it on with "dsframe": {"pass_through": ["%s"]}'


def is_comment(key: str) -> bool:
    """Keys that people write comments under. At the top level DeepSpeed ignores them."""
    return key.startswith(("_", "//", "#", "$")) or key in ("comment", "comments", "description")


def is_stranger(root: dict[str, Any]) -> bool:
    """True if a file has several keys and none that DeepSpeed has, or had, or that is spelled like one of its own."""
    legacy = {path[0] for path in (*_LEGACY, *MEANT)}
    keys = [key for key in root if not is_comment(key)]
    if len(keys) < 3 or any(key in File.model_fields or key in legacy for key in keys):
        return False
    known = places().keys() - _COMMON
    return not any(key in known or closest(key, File.model_fields) for key in keys)


def repair(raw: dict[str, Any], findings: Findings) -> frozenset[str]:
    """Rename, move or drop unknown keys of ``raw`` in place, reporting each.

    Returns:
        The dotted names that ``dsframe.pass_through`` lists: dropped from ``raw`` without a word.
    """
    listed = raw.get("dsframe", {})
    listed = listed.get("pass_through", []) if isinstance(listed, dict) else []
    passed = frozenset(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else frozenset()
    _Repair(raw, findings, passed).run()
    return passed


class _Repair:
    def __init__(self, raw: dict[str, Any], findings: Findings, passed: frozenset[str]) -> None:
        self.raw, self.findings, self.passed = raw, findings, passed
        self.renaming = False

    def run(self) -> None:
        # Misspelled names first, so that what is misplaced finds its section. The last pass sees what the one before
        # it moved into a section that it had already left behind.
        for renaming in (True, False, False):
            self.renaming = renaming
            self.visit(File, self.raw, ())
            modernise(self.raw, self.findings)

    def visit(self, owner: type[Section], raw: dict[str, Any], path: Path) -> None:
        for key in list(raw):
            if key not in owner.model_fields and not owner.open:
                self.unknown(owner, raw, key, path)
        for inner, section, value in list(children(owner, raw)):
            self.visit(section, value, path + inner)

    def unknown(self, owner: type[Section], raw: dict[str, Any], key: str, path: Path) -> None:
        here: Path = (*path, key)
        known = dotted(here) in self.passed or (not path and is_comment(key)) or here in _LEGACY
        if self.renaming:
            if not known and (name := self.meant(owner, raw, here)):
                self.rename(raw, here, name)
            return
        value = raw.pop(key)
        if dotted(here) in self.passed:
            return
        if issubclass(owner, Epochs):
            self.findings.error(here, "unknown key", 'write a number of steps, or {"epochs": 1}', code="unknown-key")
            return
        if not path and is_comment(key):
            if key != "$schema":
                self.findings.note(here, "taken as a comment", code="comment")
            return
        if here in REMOVED:
            off = value in (False, None, {}) or (isinstance(value, dict) and value.get("enabled") is False)
            remedy = "remove it (it is switched off)" if off else REMOVED[here]
            message = "removed from DeepSpeed 0.19, which raises if the key is present"
            self.findings.error(here, message, remedy, code="removed")
            if off:
                self.findings.fixes.append(Fix(here, here, remove=True))  # it was off: nothing is lost
            return
        if here in SYNONYMS:
            message, remedy = SYNONYMS[here]
            self.findings.error(here, message, remedy, code="unknown-key")
            if remedy == "remove it":
                written = self.findings.written(here)
                self.findings.fixes.append(Fix(written, written, remove=True))
            return
        self.guess(owner, raw, here, value)

    def meant(self, owner: type[Section], raw: dict[str, Any], here: Path) -> str | None:
        """The key of this section that a misspelled one stands for. One slip makes it certain; more than one only where
        the key has no other home."""
        key = str(here[-1])
        legal = [name for name in owner.model_fields if name not in raw]
        name = MEANT.get(here) or closest(key, legal, 1)
        if name is None and self.home(places().get(key, ()), here, raw[key]) is None:
            name = closest(key, legal) or containing(key, owner.model_fields)
        return name if name in legal else None

    def rename(self, raw: dict[str, Any], here: Path, name: str) -> None:
        self.findings.error(here, "unknown key", f'did you mean "{name}"?', code="unknown-key")
        raw[name] = raw.pop(str(here[-1]))
        self.assume(here, (*here[:-1], name))

    def guess(self, owner: type[Section], raw: dict[str, Any], here: Path, value: Any) -> None:
        key = str(here[-1])
        home = self.home(places().get(key, ()), here, value)
        if home is None and (twin := closest(key, owner.model_fields, 1)):
            message = f'unknown key; it looks like "{twin}", which the file has as well'
            self.findings.error(here, message, "keep one", code="unknown-key")
        elif home is not None:
            where = f'under "{dotted(home)}"' if home else "at the top level"
            self.findings.error(here, f"belongs {where}", code="misplaced-key")
            self.move(here, (*home, key), value)
        elif is_comment(key):
            message = f"comments as keys are not possible here{': DeepSpeed raises' if owner.coerced else ''}"
            self.findings.error(here, message, "write a // comment: DeepSpeed reads HJSON", code="unknown-key")
        else:
            self.stranger(owner, here, value)

    def stranger(self, owner: type[Section], here: Path, value: Any) -> None:
        """A key that resembles nothing at its place: perhaps a misspelled one of another place."""
        key, known = str(here[-1]), places()
        similar = closest(key, known, 1) if len(key) > 4 else None
        home = self.home(known[similar], (*here[:-1], similar), value) if similar else None
        if similar and home is not None:
            where = f'under "{dotted(home)}"' if home else "at the top level"
            self.findings.error(here, "unknown key", f'did you mean "{similar}" {where}?', code="unknown-key")
            return
        raises = owner.coerced or "params" in here
        effect = "DeepSpeed raises" if raises else "DeepSpeed ignores it"
        if here[0] == "dsframe":
            self.findings.error(here, "unknown key", "remove it", code="unknown-key")
        else:
            remedy = "remove it" if here[0] in MADE_HERE else f"remove it, {PASS_THROUGH % dotted(here)}"
            self.findings.error(here, f"unknown key; {effect}", remedy, code="unknown-key")

    def home(self, candidates: tuple[tuple[str, ...], ...], here: Path, value: Any) -> tuple[str, ...] | None:
        """Returns where a key belongs: the only place that has it, or the nearest of few. An object goes where one is taken,
        and nothing else does."""
        path, key = here[:-1], str(here[-1])
        if key in _COMMON:
            return None
        candidates = tuple(place for place in candidates if _fits(place, key, value))
        # What lies deep in a rare section is a better guess only where the file has that section.
        others = [place for place in candidates if place != path and (len(place) < 3 or place[0] in self.raw)]
        others = [place for place in others if place[:1] != ("autotuning",)]
        if not others or len(others) > 3:
            return None
        near = [place for place in others if path[: len(place)] == place or (path and place[: len(path)] == path)]
        if near:
            return near[0]
        written = [place for place in others if place and place[0] in self.raw]
        pick = written[0] if len(written) == 1 else others[0] if len(others) == 1 else None
        # A section of ours adopts a stranger only in a file that has it.
        return None if pick and pick[:1] == ("dsframe",) and "dsframe" not in self.raw else pick

    def move(self, old: Path, new: Path, value: Any) -> None:
        owner: Any = self.raw
        for index, part in enumerate(new[:-1]):
            if isinstance(owner, dict) and isinstance(part, str):
                if not isinstance(owner.get(part), dict) and part in owner:
                    return
                if part not in owner and (made := class_at(new[: index + 1])):
                    if any(field.is_required() for field in made.model_fields.values()):
                        return  # the section would lack more than this key
                    if new[:index]:
                        self.findings.moved(old, new[: index + 1])
                owner = owner.setdefault(part, {})
        if isinstance(owner, dict) and new[-1] not in owner:
            owner[str(new[-1])] = value
            self.assume(old, new)

    def assume(self, old: Path, new: Path) -> None:
        written = self.findings.written(old)
        self.findings.moved(old, new)
        self.findings.fixes.append(Fix(written, new))


def _fits(place: tuple[str, ...], key: str, value: Any) -> bool:
    owner = class_at(place)
    if owner is None or key not in owner.model_fields:
        return not isinstance(value, (dict, list)) or key in ("betas", "milestones")
    expected = shape(owner, key)
    takes_object = bool(expected.kinds & {"dict", "any"})
    return takes_object if isinstance(value, dict) else not expected.section or value is True


def class_at(path: Path) -> type[Section] | None:
    """The section class at a path of the schema, for overrides."""
    owner: type[Section] | None = File
    for part in path:
        if owner is None or not isinstance(part, str) or part not in owner.model_fields:
            return None
        owner = section_at(owner, part, {})
    return owner

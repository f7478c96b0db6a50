"""Finds unknown keys, reports what was probably meant, and continues as if that had been written.

So a misspelled section name is one error, and mistakes inside it are reported too.
"""

from __future__ import annotations

from typing import Any

from dsframe.config.features import MADE_HERE
from dsframe.config.read import foreign
from dsframe.config.read.findings import Findings, dotted, show
from dsframe.config.read.legacy import MEANT, REMOVED, RENAMED, SYNONYMS, modernise
from dsframe.config.read.reader import Path, Raw, inside, keys
from dsframe.config.read.suggest import closest, longer
from dsframe.config.schema.base import Epochs, Section
from dsframe.config.schema.file import File, children, places
from dsframe.config.schema.settings import TASKS, CustomTask

_COMMON = frozenset(
    {"enabled", "type", "name", "params", "dtype", "profile", "mode", "model", "model_type", "properties", "title", "seed", "d",
     "shape"}
)  # fmt: skip
"""Keys too common to tell which section they belong to."""
_FEW = 12
"""A section with at most this many keys lists them if no key is similar."""
_NULL: tuple[Any, ...] = (False, None, {})


def is_comment(key: str) -> bool:
    """True for keys that hold comments. At the top level DeepSpeed ignores them."""
    return key.startswith(("_", "//", "#", "$")) or key in ("comment", "comments", "description")


def has_no_known_key(root: Raw) -> bool:
    """True if a file has several keys, none of which is (or was, or is similar to) a key of DeepSpeed."""
    legacy = {name.partition(".")[0] for name in (*REMOVED, *RENAMED, *SYNONYMS, *MEANT)}
    names = [key for key in root if not is_comment(key)]
    if len(names) < 3 or any(key in File.model_fields or key in legacy for key in names):
        return False
    known = places().keys() - _COMMON
    return not any(key in known or closest(key, File.model_fields) for key in names)


def repair(raw: Raw, findings: Findings) -> frozenset[str]:
    """Renames, moves or drops unknown keys of ``raw`` in place, and reports each.

    Returns:
        The dotted names in ``dsframe.pass_through``, which are dropped from ``raw`` without a report.
    """
    listed = inside(raw, ("dsframe", "pass_through"))
    passed = frozenset(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else frozenset()
    modernise(raw, findings)
    _Repair(raw, findings, passed).visit(File, raw, ())
    modernise(raw, findings)  # for sections whose misspelled name was corrected
    return passed


class _Repair:
    def __init__(self, raw: Raw, findings: Findings, passed: frozenset[str]) -> None:
        self.raw, self.findings, self.passed = raw, findings, passed

    def visit(self, owner: type[Section], raw: Raw, path: Path) -> None:
        for key in list(raw):
            name = dotted((*path, key))
            if key not in owner.model_fields and not owner.open and name not in RENAMED:
                value = raw.pop(key)
                if name not in self.passed and name != "$schema":
                    self.judge(owner, raw, (*path, key), value)
        for inner, section, value in list(children(owner, raw)):
            self.visit(section, value, path + inner)

    def unknown(self, path: Path, message: str = "unknown key", remedy: str = "remove it") -> None:
        self.findings.error(path, message, remedy, code="unknown-key")

    def judge(self, owner: type[Section], raw: Raw, path: Path, value: Any) -> None:
        """Reports an unknown key. ``raw`` is its section, without the key."""
        name, key = dotted(path), str(path[-1])
        if issubclass(owner, Epochs):
            meant = closest(key, owner.model_fields, 1)
            self.unknown(
                path, remedy=f'did you mean "{meant}"?' if meant else 'write a number of steps, or {"epochs": 1}'
            )
        elif len(path) == 1 and is_comment(key):
            self.findings.note(path, "taken as a comment", code="comment")
        elif name in REMOVED:
            off = value in _NULL or (isinstance(value, dict) and value.get("enabled") is False)
            remedy = "remove it (it is switched off)" if off else REMOVED[name]
            message = "removed from DeepSpeed 0.19, which raises if the key is present"
            self.findings.error(path, message, remedy, code="removed")
        elif name in SYNONYMS:
            self.unknown(path, *SYNONYMS[name])
        elif owner in TASKS.values() and inside(self.raw, (*path[:-1], "name")) not in (None, *TASKS):
            pass  # the error is the task's name, which is reported
        elif owner in TASKS.values() and (tasks := [show(task) for task in TASKS if key in TASKS[task].model_fields]):
            self.unknown(path, "not a key of this task", f'"name": {" or ".join(tasks)} has it')
        elif self.foreign(owner, path):
            self.translate(path, value)
        else:
            self.guess(owner, raw, path, value)

    def foreign(self, owner: type[Section], path: Path) -> bool:
        """True for a key of another trainer at the top level, or in a section of dsframe without a similar key."""
        key = str(path[-1])
        within = path[0] == "dsframe" and owner is not CustomTask
        ours = path[:-1] in ((), ("dsframe",)) or (within and not closest(key, owner.model_fields))
        return ours and foreign.answers(key) and dotted(path) not in MEANT

    def translate(self, path: Path, value: Any) -> None:
        """Reports the equivalent of another trainer's key, and continues as if it had been written."""
        key = str(path[-1])
        target = foreign.target(key)
        target_path = keys(target or "")
        if target is None:
            self.unknown(
                path, remedy=foreign.advice(key) or "remove it: dsframe does so by itself, or has nothing like it"
            )
        elif inside(self.raw, target_path) is not None:
            self.unknown(path, f'another name of "{target}", which the file has as well', "keep one")
        else:
            written = show(value)
            for part in reversed(target_path[1:]):
                written = f'{{"{part}": {written}}}'
            self.unknown(path, remedy=f'write "{target_path[0]}": {written}')
            self.move(path, target_path, value)
        self.findings.answered(path)

    def guess(self, owner: type[Section], raw: Raw, path: Path, value: Any) -> None:
        """Reports which key is probably meant: a similar one, one that this shortens, or the same one in another
        section.

        One typo is certain; several count only if the key belongs to no other section.
        """
        key, fields = str(path[-1]), owner.model_fields
        meant = MEANT.get(dotted(path)) or closest(key, fields, 1)
        begin, others = ([], []) if meant else longer(key, fields)
        home = None if meant or begin else self.home(key, path)
        if home is None:
            meant = meant or (begin[0] if len(begin) == 1 else closest(key, fields))
        if meant and meant in raw and not self.findings.is_override(path):
            self.unknown(path, f'unknown key; it looks like "{meant}", which the file has as well', "keep one")
        elif meant:
            self.unknown(path, remedy=f'did you mean "{meant}"?')
            if meant not in raw:
                raw[meant] = value
                self.findings.moved(path, (*path[:-1], meant))
        elif begin or (others and home is None):
            self.unknown(path, remedy=f"did you mean {' or '.join(map(show, begin or others))}?")
        elif home is not None:
            where = f'under "{dotted(home)}"' if home else "at the top level"
            self.findings.error(path, f"belongs {where}", code="misplaced-key")
            self.move(path, (*home, key), value)
        elif is_comment(key):
            message = f"comments as keys are not possible here{': DeepSpeed raises' if owner.coerced else ''}"
            self.unknown(path, message, "write a // comment: DeepSpeed reads HJSON")
        elif path[0] == "dsframe":
            few = len(fields) <= _FEW
            self.unknown(path, remedy=f"the keys here are {', '.join(sorted(fields))}" if few else "remove it")
        else:
            raises = owner.coerced or "params" in path
            forward = f', or pass it on with "dsframe": {{"pass_through": ["{dotted(path)}"]}}'
            remedy = "remove it" + ("" if path[0] in MADE_HERE else forward)
            self.unknown(path, f"unknown key; {'DeepSpeed raises' if raises else 'DeepSpeed ignores it'}", remedy)

    def home(self, key: str, path: Path) -> Path | None:
        """Returns the only section that a key belongs to; a section of dsframe only if the file has one."""
        homes = [home for home in places().get(key, ()) if home != path[:-1]]
        foreign = homes[:1] and homes[0][:1] == ("dsframe",) and "dsframe" not in self.raw
        return homes[0] if len(homes) == 1 and key not in _COMMON and not foreign else None

    def move(self, old: Path, new: Path, value: Any) -> None:
        """Continues as if the value were at ``new``, if the file has that section."""
        owner = inside(self.raw, new[:-1])
        if isinstance(owner, dict) and new[-1] not in owner:
            owner[str(new[-1])] = value
            self.findings.moved(old, new)

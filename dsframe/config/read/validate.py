"""Checks types and ranges section by section with pydantic, after the conversions that DeepSpeed itself makes.

Every message is ours: what is there, what is expected, what to write.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from dsframe.config.read.findings import Findings, Fix, show
from dsframe.config.read.reader import NOT_JSON, Path, inside, number_of
from dsframe.config.read.suggest import closest
from dsframe.config.schema.base import AUTO, Section
from dsframe.config.schema.deepspeed import Scalars
from dsframe.config.schema.file import File, Shape, children, section_at, shape
from dsframe.config.schema.settings import TASKS
from dsframe.engines.table import TABLE

_MEANT = {
    "gpu": ("none",), "cuda": ("none",), "average": ("mean",), "avg": ("mean", "average"), "mean": ("average",),
    "warning": ("WARN",),
}  # fmt: skip
"""Words of other tools -> the words here, of which one may be possible."""

_LIMITS = {
    "greater_than": ("gt", "above"), "greater_than_equal": ("ge", "at least"), "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}  # fmt: skip
"""pydantic's kinds of errors: the key of the limit, and what a number must be."""

_PLACEHOLDER = re.compile(r"[A-Z][A-Za-z0-9_]*|.*[$<{].*")

_TRUE, _FALSE = {"true", "yes", "on", "y", "t", "1"}, {"false", "no", "off", "n", "f", "0"}


def validate(raw: dict[str, Any], findings: Findings) -> File:
    """The typed file. Sections with errors come out with their defaults, so that later checks can go on."""
    _Converter(findings).section(File, raw, ())
    values: dict[str, Any] = {}
    scalars = {key: value for key, value in raw.items() if key in Scalars.model_fields}
    for key in _check(Scalars, scalars, (), findings):
        scalars.pop(key, None)
    values.update(scalars)
    for key, value in raw.items():
        if key in values or key in Scalars.model_fields:
            continue
        section = shape(File, key).section
        if section is None:
            values[key] = value
        elif isinstance(value, dict):
            values[key] = _build(section, value, (key,), findings)
        elif value is not None:
            expected = ' {"enabled": true}' if "enabled" in section.model_fields else " an object {...}"
            message = f"expected an object, found {show(value)}"
            findings.error((key,), message, f"write{expected}", code="type", at_value=True)
    given = {key: value for key, value in values.items() if value is not None}
    return File.model_construct(set(given), **given)


def _build(section: type[Section], raw: dict[str, Any], path: Path, findings: Findings) -> Section | None:
    _parameters(section, raw, path, findings)
    wrong = _check(section, raw, path, findings)
    if wrong:
        raw = {key: value for key, value in raw.items() if key not in wrong}
    try:
        return section.model_validate(raw)
    except ValidationError:
        fields = section.model_fields
        return None if any(field.is_required() for field in fields.values()) else section.model_construct()


def _parameters(section: type[Section], raw: dict[str, Any], path: Path, findings: Findings) -> None:
    """Checks a free dictionary by the class that another value chooses: ``params`` by ``type``, the options of an
    engine by its name."""
    for free in ("params", "engine_options"):
        chosen = section.variant(raw, free) if free in section.model_fields else None
        parameters = raw.get(free)
        if chosen is not None and isinstance(parameters, dict):
            known = {key: value for key, value in parameters.items() if key in chosen.model_fields}
            _check(chosen, known, (*path, free), findings)
            for inner, part, value in children(chosen, known):
                _parameters(part, value, (*path, free, *inner), findings)
        elif chosen is not None and parameters is None:
            needed = [name for name, field in chosen.model_fields.items() if field.is_required()]
            for name in needed:
                findings.error((*path, free), f'"{name}" is required', code="missing")


def _check(section: type[Section], raw: dict[str, Any], path: Path, findings: Findings) -> set[str]:
    """Report what pydantic finds wrong. Returns the keys of ``raw`` that hold something wrong."""
    try:
        section.model_validate(raw)
    except ValidationError as failure:
        return _report(failure, section, raw, path, findings)
    return set()


def _report(
    failure: ValidationError, section: type[Section], raw: dict[str, Any], path: Path, findings: Findings
) -> set[str]:
    grouped: dict[Path, list[dict[str, Any]]] = {}
    for error in failure.errors(include_url=False):
        inner = _inner_path(error["loc"], raw)
        if error["type"] == "missing":
            inner = (*inner, str(error["loc"][-1]))
        grouped.setdefault(inner, []).append(dict(error))
    # A union reports each branch: the deepest place is the one that says what is wrong.
    for inner in [a for a in grouped if any(b != a and b[: len(a)] == a for b in grouped)]:
        del grouped[inner]
    for inner, errors in grouped.items():
        if path + inner in findings.pending:
            continue
        telling = (one for one in errors if not one["type"].endswith(("_type", "literal_error", "tag_invalid")))
        _explain(next(telling, errors[0]), section, raw, path, inner, findings)
    return {str(inner[0]) for inner in grouped if inner and path + inner not in findings.pending}


def _inner_path(location: tuple[str | int, ...], raw: Any) -> Path:
    """The part of pydantic's location that exists in the file: union branches have names of their own in it."""
    inner: list[str | int] = []
    value: Any = raw
    for part in location:
        is_item = isinstance(value, list) and isinstance(part, int)
        if is_item or (isinstance(value, dict) and part in value):
            inner.append(part)
            value = value[part]
    return tuple(inner)


def _explain(
    error: dict[str, Any], section: type[Section], raw: dict[str, Any], path: Path, inner: Path, findings: Findings
) -> None:
    kind, context = str(error["type"]), error.get("ctx", {})
    here = path + inner
    value = raw if kind == "missing" else inside(raw, inner)
    expected = _expected(section, inner, raw)
    if here == ("dsframe", "engine"):  # only now: what is installed is not looked up for files that are right
        expected = Shape(kinds=frozenset({"str"}), literals=(AUTO, *TABLE))
    if kind == "missing":
        findings.error(here, "is required", "add it", code="missing")
    elif kind in _LIMITS:
        key, words = _LIMITS[kind]
        findings.error(here, f"{show(value)} must be {words} {context[key]:.15g}", code="range", at_value=True)
    elif kind == "finite_number":
        findings.error(here, f"{show(value)} is not finite", "write a number", code="range", at_value=True)
    elif kind in ("too_short", "too_long"):
        count = context.get("min_length") or context.get("max_length")
        findings.error(here, f"{show(value)} must have {count} items", code="range", at_value=True)
    elif kind == "string_pattern_mismatch":
        form = {"keep_best": '"metric:min" or "metric:max"'}.get(str(here[-1]), '"package.module:Class"')
        findings.error(here, f"{show(value)} is not {form}", code="range", at_value=True)
    elif (
        expected.literals
        and findings.written(here) not in findings.document.bare
        and (isinstance(value, str) or expected.kinds <= {"int", "null"})
    ):
        _not_one_of(here, value, expected, findings)
    else:
        _wrong_type(here, value, expected, findings)


def _expected(section: type[Section], inner: Path, raw: Any) -> Shape:
    owner: type[Section] | None = section
    found = Shape()
    for index, part in enumerate(inner):
        if isinstance(part, int):
            found = found.item or found
        elif owner is not None and part in owner.model_fields:
            found = shape(owner, part)
        elif found.entry is not None:
            found = found.entry
        else:
            return Shape()
        value = inside(raw, inner[:index])
        if owner is not None and isinstance(part, str) and part in owner.model_fields:
            owner = section_at(owner, part, value) or found.unit
        else:
            owner = found.section or found.unit
    return found


def _not_one_of(here: Path, value: Any, expected: Shape, findings: Findings) -> None:
    words = [word for word in expected.literals if isinstance(word, str)]
    phrase = expected.phrase
    if here == ("dsframe", "task", "name"):
        words = [*TASKS]
        phrase = ", ".join(f'"{name}"' for name in TASKS) + ' or "package.module:Class"'
    similar = None
    if isinstance(value, str):
        meant = next((word for word in _MEANT.get(value.lower(), ()) if word in words), None)
        similar = meant or closest(value, words, max(1, len(value) // 3))
    remedy = f'did you mean "{similar}"?' if similar else ""
    findings.error(here, f"{show(value)} must be {phrase}", remedy, code="value", at_value=True)


def _wrong_type(here: Path, value: Any, expected: Shape, findings: Findings) -> None:
    remedy = ""
    if findings.written(here) in findings.document.bare:
        word = str(value).rstrip(",")
        hint = NOT_JSON.get(word, "replace the placeholder of the template" if _PLACEHOLDER.fullmatch(word) else "")
        message = f"{word} without quotes is text and must be {expected.phrase}"
        findings.error(here, message, hint, code="type", at_value=True)
        return
    if isinstance(value, str) and expected.kinds & {"int", "float"} and number_of(value) is not None:
        remedy = f"write {value.strip()} without quotes"
    elif isinstance(value, str) and "bool" in expected.kinds and value.lower().rstrip(",") in _TRUE | _FALSE:
        remedy = f"write {show(value.lower().rstrip(',') in _TRUE)} without quotes"
    elif here == ("fp16", "loss_scale") and value == "dynamic":
        remedy = "write 0 for dynamic loss scaling"
    elif value is None and here == ("scheduler", "params"):
        remedy = "write {}"
    elif value is None or (value is False and expected.section):
        remedy = "remove the key to get the default"
    elif isinstance(value, str) and expected.section and "device" in expected.section.model_fields:
        remedy = f'write {{"device": {show(value)}}}'
    elif isinstance(value, bool) and expected.section and "enabled" in expected.section.model_fields:
        remedy = f'write {{"enabled": {show(value)}}}'
    findings.error(here, f"{show(value)} must be {expected.phrase}", remedy, code="type", at_value=True)


class _Converter:
    """Turns values into what DeepSpeed takes them for, in place: 5e8 is an integer, and in its own models "2" is 2."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings

    def section(self, owner: type[Section], raw: dict[str, Any], path: Path) -> None:
        for key in list(raw):
            if key not in owner.model_fields:
                continue
            expected, here = shape(owner, key), (*path, key)
            section = section_at(owner, key, raw)
            if key in owner.folded and isinstance(raw[key], str):
                raw[key] = raw[key].lower() if owner.folded[key] == "lower" else raw[key].upper()
            if raw[key] is None:
                self.null(owner, raw, key, expected, here)
            elif section is not None and isinstance(raw[key], dict):
                self.section(section, raw[key], here)
            elif isinstance(raw[key], list):
                raw[key] = self.items(owner, raw[key], expected, here)
            elif isinstance(raw[key], dict) and expected.entry is not None and expected.entry.section:
                for name, entry in raw[key].items():
                    if isinstance(entry, dict):
                        self.section(expected.entry.section, entry, (*here, name))
            else:
                raw[key] = self.value(owner, raw[key], expected, here)

    def items(self, owner: type[Section], values: list[Any], expected: Shape, here: Path) -> list[Any]:
        if expected.item is None:
            return values
        for index, value in enumerate(values):
            if expected.item.section and isinstance(value, dict):
                self.section(expected.item.section, value, (*here, index))
        return [self.value(owner, value, expected.item, (*here, index)) for index, value in enumerate(values)]

    def null(self, owner: type[Section], raw: dict[str, Any], key: str, expected: Shape, here: Path) -> None:
        nullable = expected.section is not None and expected.section.nullable
        if "null" in expected.kinds and (owner.coerced or nullable or not expected.section):
            return
        if nullable or here in (("bf16",), ("optimizer", "params")):
            del raw[key]
        elif not owner.coerced and owner.model_fields[key].default is False and key != "wall_clock_breakdown":
            del raw[key]
            message = "DeepSpeed takes null for false here"
            self.findings.warning(here, message, "write false, or remove the key", code="null", at_value=True)
        elif expected.section is not None:
            del raw[key]
            why = "" if here[0] == "dsframe" else ": DeepSpeed raises"
            self.findings.error(here, f"null is not an object{why}", "remove the key", code="type", at_value=True)

    def value(self, owner: type[Section], value: Any, expected: Shape, here: Path) -> Any:
        kinds = expected.kinds
        if isinstance(value, bool) and kinds & {"int", "float"} and "bool" not in kinds:
            _wrong_type(here, value, expected, self.findings)  # for pydantic, true is one of 0, 1, 2, 3
            return value
        if isinstance(value, float) and value == value and abs(value) != float("inf") and value == int(value):
            return int(value) if "int" in kinds and "float" not in kinds else value
        if isinstance(value, int) and not isinstance(value, bool) and "bool" in kinds and value in (0, 1):
            return value if kinds & {"int", "float"} else self.converted(here, value, bool(value))
        if owner.__name__ == "LeafModule" and isinstance(value, str) and "list" in kinds:
            return [value]  # DeepSpeed takes one name for a list of one
        if not owner.coerced or not isinstance(value, str) or "str" in kinds:
            return value
        number = number_of(value)
        if "int" in kinds and isinstance(number, int) and not {"e", "E"} & set(value):
            return self.converted(here, value, number)
        if "float" in kinds and number is not None:
            return self.converted(here, value, number)
        if "bool" in kinds and value.lower() in _TRUE | _FALSE:
            return self.converted(here, value, value.lower() in _TRUE)
        return value

    def converted(self, here: Path, value: Any, meaning: Any) -> Any:
        message = f"DeepSpeed reads {show(value)} as {show(meaning)}"
        self.findings.warning(here, message, f"write {show(meaning)}", code="coerced", at_value=True)
        self.findings.fix(here, here, value=meaning, replace=True)
        return meaning

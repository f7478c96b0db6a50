"""Checks types and ranges with pydantic, after the same conversions as DeepSpeed.

The messages are dsframe's own: what is there, what is expected, what to write.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from dsframe.config.read.findings import Findings, show
from dsframe.config.read.reader import Path, Raw, inside, number_of
from dsframe.config.read.suggest import did_you_mean
from dsframe.config.schema.base import AUTO, Section
from dsframe.config.schema.file import File, Shape, children, shape
from dsframe.config.schema.settings import TASKS
from dsframe.engines.table import TABLE

_RANGES = {
    "greater_than": "must be above {gt:.15g}", "greater_than_equal": "must be at least {ge:.15g}",
    "less_than": "must be below {lt:.15g}", "less_than_equal": "must be at most {le:.15g}",
    "finite_number": "is not finite", "too_short": "must have {min_length} items",
    "too_long": "must have {max_length} items",
}  # fmt: skip
"""pydantic's error types for a value of the right type -> what is wrong."""
_FORMS = {"keep_best": '"metric:min" or "metric:max"', "metric": '"metric:min" or "metric:max"'}
_VAGUE = ("_type", "literal_error", "tag_invalid")
"""Suffixes of pydantic's error types that are not about the value's range."""
_NULL_RAISES = (
    ("sequence_parallel_size",),
    ("torch_autocast", "dtype"),
    ("torch_autocast", "lower_precision_safe_modules"),
)
"""Keys whose default is None, but for which DeepSpeed 0.19.8 refuses a written null."""
_FREE = ("params", "engine_options")
"""Objects whose keys depend on another value."""
_TRUTH = dict.fromkeys(("true", "yes", "on", "y", "t", "1"), True)
_TRUTH |= dict.fromkeys(("false", "no", "off", "n", "f", "0"), False)


def validate(raw: Raw, findings: Findings) -> File:
    """Returns the typed file. Invalid values are replaced by their defaults, so that later checks can continue."""
    _convert(File, raw, (), findings)
    _parameters(File, raw, (), findings)
    values = {key: value for key, value in raw.items() if value is not None or "null" not in shape(File, key).kinds}
    first: Findings | None = findings
    while True:
        try:
            return File.model_validate(values)
        except ValidationError as failure:
            for wrong in _report(failure, File, values, (), first):
                values = _without(values, wrong)
        first = None  # errors that follow from an invalid key are not reported


def _without(values: Raw, path: Path) -> Raw:
    """Returns a copy without the key at the first one or two levels of ``path``: sections are small."""
    remaining = {key: value for key, value in values.items() if key != path[0]}
    inner = values.get(str(path[0]))
    if len(path) > 1 and isinstance(inner, dict) and path[1] in inner:
        remaining[str(path[0])] = {key: value for key, value in inner.items() if key != path[1]}
    return remaining


def _parameters(owner: type[Section], raw: Raw, path: Path, findings: Findings) -> None:
    """Checks an object whose class depends on another value: ``params`` by ``type``, engine options by the engine."""
    for free in _FREE:
        chosen = owner.variant(raw, free) if free in owner.model_fields else None
        if chosen is not None and raw.get(free) is None:
            for name, field in chosen.model_fields.items():
                if field.is_required():
                    findings.error((*path, free), f'"{name}" is required', code="missing")
    for inner, section, value in children(owner, raw):
        if inner[-1] in _FREE:
            known_values = {key: item for key, item in value.items() if key in section.model_fields}
            try:
                section.model_validate(known_values)
            except ValidationError as failure:
                _report(failure, section, known_values, path + inner, findings)
        _parameters(section, value, path + inner, findings)


def _report(
    failure: ValidationError, owner: type[Section], raw: Raw, path: Path, findings: Findings | None
) -> list[Path]:
    """Reports pydantic's errors. Returns the paths of unusable values."""
    grouped: dict[Path, list[Any]] = {}
    for error in failure.errors(include_url=False):
        inner = _existing(error["loc"], raw)
        grouped.setdefault((*inner, error["loc"][-1]) if error["type"] == "missing" else inner, []).append(error)
    unusable = []
    for inner, errors in grouped.items():
        # A union reports every branch; the deepest member tells what is wrong.
        deeper = any(other != inner and other[: len(inner)] == inner for other in grouped)
        telling = [error for error in errors if not error["type"].endswith(_VAGUE)]
        error = (telling or errors)[0]
        unusable.append(inner[:-1] if error["type"] == "missing" else inner)
        if findings is not None and not deeper and path + inner not in findings.pending:
            _explain(error, _expected(owner, inner, raw), inside(raw, inner), path + inner, findings)
    return unusable


def _existing(location: tuple[str | int, ...], raw: Any) -> Path:
    """Returns the part of pydantic's location that exists in the file, without names of union branches."""
    inner: list[str | int] = []
    for part in location:
        if (isinstance(raw, list) and isinstance(part, int)) or (isinstance(raw, dict) and part in raw):
            inner.append(part)
            raw = inside(raw, (part,))
    return tuple(inner)


def _expected(owner: type[Section], path: Path, raw: Any) -> Shape:
    """Returns what the member at ``path`` accepts."""
    expected = Shape(section=owner)
    for index, part in enumerate(path):
        section = expected.section or expected.unit
        if isinstance(part, int):
            expected = expected.item or expected
        elif section is not None and part in section.model_fields:
            expected = shape(section, part)
            chosen = section.variant(inside(raw, path[:index]), part) if isinstance(raw, dict) else None
            expected = replace(expected, section=chosen or expected.section)
        else:
            expected = expected.entry or Shape()
    return expected


def _explain(error: Any, expected: Shape, value: Any, path: Path, findings: Findings) -> None:
    name = error["type"]
    if path == ("dsframe", "engine"):  # installed engines are looked up only for wrong files
        expected = Shape(kinds=frozenset({"str"}), literals=(AUTO, *TABLE))
    elif path == ("dsframe", "task", "name") and ":" not in str(value):
        expected = Shape(kinds=frozenset({"str"}), literals=(*TASKS, "package.module:Class"))
    if name == "missing":
        findings.error(path, "is required", "add it", code="missing")
    elif name in _RANGES:
        message = f"{show(value)} {_RANGES[name].format(**error.get('ctx', {}))}"
        findings.error(path, message, code="range", at_value=True)
    elif name == "string_pattern_mismatch" and not expected.literals:
        form = _FORMS.get(str(path[-1]), '"package.module:Class"')
        findings.error(path, f"{show(value)} is not {form}", code="range", at_value=True)
    elif expected.literals and (isinstance(value, str) or expected.kinds <= {"int", "null"}):
        words = [word for word in expected.literals if isinstance(word, str)]
        remedy = did_you_mean(value, words, max(1, len(value) // 3)) if isinstance(value, str) else ""
        if value in ("gpu", "cuda") and "none" in words:  # the most similar word would be "cpu"
            remedy = 'did you mean "none"?'
        findings.error(path, f"{show(value)} must be {expected.phrase}", remedy, code="value", at_value=True)
    else:
        _wrong_type(path, value, expected, findings)


def _wrong_type(path: Path, value: Any, expected: Shape, findings: Findings) -> None:
    shown, remedy = show(value), ""
    fields = expected.section.model_fields if expected.section else {}
    lowered = str(value).lower().rstrip(",")
    if isinstance(value, str) and expected.kinds & {"int", "float"} and number_of(value) is not None:
        remedy = f"write {value.strip()} without quotes"
    elif isinstance(value, str) and "bool" in expected.kinds and lowered in _TRUTH:
        remedy = f"write {show(_TRUTH[lowered])} without quotes"
    elif path == ("fp16", "loss_scale") and value == "dynamic":
        remedy = "write 0 for dynamic loss scaling"
    elif key := _only_key(path, value, fields):
        remedy = f'write {{"{key}": {show(value)}}}'
    elif value is None or (value is False and expected.section):
        remedy = "remove the key to get the default"
    findings.error(path, f"{shown} must be {expected.phrase}", remedy, code="type", at_value=True)


def _only_key(path: Path, value: Any, fields: Collection[str]) -> str | None:
    """Returns the key for an object that is written as a single value: ``"optimizer": "AdamW"``."""
    if path == ("dsframe", "task") and isinstance(value, str):
        return "name"
    types = {"device": str, "type": str, "enabled": bool, "stage": int}
    return next((key for key, value_type in types.items() if key in fields and type(value) is value_type), None)


def _convert(owner: type[Section], raw: Raw, path: Path, findings: Findings) -> None:
    """Converts values in place as DeepSpeed does: 5e8 is an integer, and in its pydantic models "2" is 2."""
    for key in [key for key in raw if key in owner.model_fields]:
        value, expected, member_path = raw[key], shape(owner, key), (*path, key)
        if key in owner.folded and isinstance(value, str):
            raw[key] = value = getattr(value, owner.folded[key])()
        if value is None:
            _null(owner, raw, key, member_path, findings)
        elif isinstance(value, list) and expected.item is not None:
            raw[key] = [
                _value(owner, item, expected.item, (*member_path, index), findings) for index, item in enumerate(value)
            ]
        elif not isinstance(value, (dict, list)):
            raw[key] = _value(owner, value, expected, member_path, findings)
    for inner, section, value in list(children(owner, raw)):
        _convert(section, value, path + inner, findings)


def _null(owner: type[Section], raw: Raw, key: str, path: Path, findings: Findings) -> None:
    expected = shape(owner, key)
    if path in _NULL_RAISES:
        findings.error(path, "null: DeepSpeed raises", "remove the key", code="null", at_value=True)
        return
    nullable = expected.section is not None and expected.section.nullable
    if "null" in expected.kinds and (owner.coerced or nullable or not expected.section):
        return
    if nullable or path in (("bf16",), ("optimizer", "params")):
        del raw[key]
    elif not owner.coerced and owner.model_fields[key].default is False and key != "wall_clock_breakdown":
        del raw[key]
        message = "DeepSpeed takes null for false here"
        findings.warning(path, message, "write false, or remove the key", code="null", at_value=True)
    elif expected.section is not None:
        del raw[key]
        why = "" if path[0] == "dsframe" else ": DeepSpeed raises"
        findings.error(path, f"null is not an object{why}", "remove the key", code="type", at_value=True)


def _value(owner: type[Section], value: Any, expected: Shape, path: Path, findings: Findings) -> Any:
    kinds, meaning = expected.kinds, value
    numeric = bool(kinds & {"int", "float"})
    if isinstance(value, bool):
        if numeric and "bool" not in kinds:  # pydantic takes true as 1
            _wrong_type(path, value, expected, findings)
        return value
    if isinstance(value, float):
        is_integral = "int" in kinds and "float" not in kinds and value.is_integer()
        return int(value) if is_integral else value
    if isinstance(value, int):
        meaning = bool(value) if "bool" in kinds and not numeric and value in (0, 1) else value
    elif owner.wraps and "list" in kinds:
        return [value]
    if meaning is not value:
        message = f"DeepSpeed reads {show(value)} as {show(meaning)}"
        findings.warning(path, message, f"write {show(meaning)}", code="coerced", at_value=True)
    return meaning

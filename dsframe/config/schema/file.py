"""The complete file, and access to its schema without validation."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import Field

from dsframe.config.schema.base import Epochs, Section
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.optimizer import Optimizer
from dsframe.config.schema.parameters import DEEPSPEED_OPTIMIZERS, DEEPSPEED_SCHEDULERS, TORCH_OPTIMIZERS
from dsframe.config.schema.scheduler import Scheduler
from dsframe.config.schema.settings import Settings, VisionTask


class File(DeepSpeed):
    """A ds_config file: DeepSpeed's keys at the top level and the ``dsframe`` section."""

    dsframe: Settings = Field(default_factory=Settings.model_construct)
    """What dsframe needs beyond DeepSpeed's keys."""


@dataclass(frozen=True, eq=False, repr=False)
class Shape:
    """What a field accepts."""

    section: type[Section] | None = None
    """Class of the object."""
    item: Shape | None = None
    """Shape of the list's items."""
    entry: Shape | None = None
    """Shape of the values of an object with free keys."""
    kinds: frozenset[str] = frozenset()
    """Some of int, float, bool, str, list, dict, null, any."""
    literals: tuple[Any, ...] = ()
    unit: type[Epochs] | None = None
    """An object of this class may replace the number, as the same quantity in another unit."""

    @property
    def phrase(self) -> str:
        """What is expected, as text."""
        literals = [value for value in self.literals if not str(value).startswith(("None", "torch."))]
        alternatives = [f'"{value}"' if isinstance(value, str) else str(value).lower() for value in literals]
        spelled = {_KINDS[type(value)] for value in self.literals}
        alternatives += [text for name, text in _PHRASES.items() if name in self.kinds and name not in spelled]
        if self.item and self.item.kinds and "a list" in alternatives:
            alternatives[alternatives.index("a list")] = f"a list of {self.item.plural}"
        alternatives += ['{"epochs": 1}'] if self.unit else []
        return " or ".join(filter(None, (", ".join(alternatives[:-1]), *alternatives[-1:]))) or (
            "null" if "null" in self.kinds else "another value"
        )

    @property
    def plural(self) -> str:
        """What is expected of list items, as text."""
        text = next((text for name, text in _PLURALS.items() if name in self.kinds), "values")
        return f'{text} or {{"epochs": 1}}' if self.unit else text


_KINDS = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null"}
_PHRASES = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "text in quotes", "list": "a list",
    "dict": "an object {...}",
}  # fmt: skip
_PLURALS = {"float": "numbers", "int": "whole numbers", "str": "texts", "dict": "objects"}


@cache
def shape(owner: type[Section], key: str) -> Shape:
    """Returns what ``owner`` accepts for ``key``."""
    return _shape(owner.model_fields[key].annotation)


def _shape(annotation: Any) -> Shape:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shape(arguments[0])
    if origin is Literal:
        return Shape(kinds=frozenset(_KINDS[type(value)] for value in arguments), literals=arguments)
    if origin in (Union, types.UnionType):
        return _union([_shape(part) for part in arguments])
    if origin is list:
        return Shape(kinds=frozenset({"list"}), item=_shape(arguments[0]))
    if origin is dict:
        return Shape(kinds=frozenset({"dict"}), entry=_shape(arguments[1]))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Shape(section=annotation, kinds=frozenset({"dict"}))
    return Shape(kinds=frozenset({_KINDS.get(annotation, "any")}))


def _union(parts: list[Shape]) -> Shape:
    units = [part for part in parts if part.section and issubclass(part.section, Epochs)]
    others = [part for part in parts if part not in units]
    return Shape(
        unit=cast("type[Epochs]", units[0].section) if units else None,
        section=next((part.section for part in others if part.section), None),
        item=next((part.item for part in others if part.item), None),
        entry=next((part.entry for part in others if part.entry), None),
        kinds=frozenset().union(*(part.kinds for part in others)),
        literals=tuple(value for part in others for value in part.literals),
    )


def section_at(owner: type[Section], key: str, raw: Any) -> type[Section] | None:
    """Returns the class that describes the object at ``key``, which may depend on the other values."""
    chosen = owner.variant(raw, key) if isinstance(raw, dict) and key in raw else None
    return chosen or shape(owner, key).section


def children(owner: type[Section], raw: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], type[Section], Any]]:
    """Yields each object below ``raw`` that has a schema, with its relative path."""
    for key in [key for key in raw if key in owner.model_fields]:
        value, expected = raw[key], shape(owner, key)
        section, inner = section_at(owner, key, raw) or expected.unit, expected.item or expected.entry
        items: Any = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
        if section is not None and isinstance(value, dict):
            yield (key,), section, value
        elif inner is not None and (part := inner.section or inner.unit):
            for name, item in items:
                if isinstance(item, dict):
                    yield (key, name), part, item


@cache
def places() -> dict[str, tuple[tuple[str, ...], ...]]:
    """Returns key -> paths of the sections that may have it, shortest first."""
    homes: dict[str, dict[tuple[str, ...], None]] = {}
    typical: dict[type[Section], tuple[type[Section], ...]] = {
        Optimizer: (DEEPSPEED_OPTIMIZERS["adam"], TORCH_OPTIMIZERS["SGD"]),
        Scheduler: tuple(DEEPSPEED_SCHEDULERS.values()),
    }

    def visit(owner: type[Section], path: tuple[str, ...]) -> None:
        for key in owner.model_fields:
            homes.setdefault(key, {})[path] = None
            section = VisionTask if (*path, key) == ("dsframe", "task") else shape(owner, key).section
            if section is not None:
                visit(section, (*path, key))
        for parameters in typical.get(owner, ()):
            visit(parameters, (*path, "params"))

    visit(File, ())
    return {key: tuple(sorted(paths, key=len)) for key, paths in homes.items()}

"""The file as a whole, and a way to look at its schema without validating anything."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field

from dsframe.config.schema.base import Epochs, Section
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.optimizer import Optimizer
from dsframe.config.schema.parameters import DEEPSPEED_OPTIMIZERS, DEEPSPEED_SCHEDULERS, TORCH_OPTIMIZERS
from dsframe.config.schema.scheduler import Scheduler
from dsframe.config.schema.settings import CustomTask, Settings, VisionTask


class File(DeepSpeed):
    """A ds_config file: DeepSpeed's keys at the top level and one section of dsframe's."""

    dsframe: Settings = Field(default_factory=Settings.model_construct)
    """What dsframe needs to know beyond DeepSpeed's keys."""


@dataclass(frozen=True, eq=False, repr=False)
class Shape:
    """What a field takes, as far as a reader of the file needs to know."""

    section: type[Section] | None = None
    """The value is an object of this class."""
    item: Shape | None = None
    """The value is a list of these."""
    entry: Shape | None = None
    """The value is an object with free keys and these values."""
    kinds: frozenset[str] = frozenset()
    """Of: int, float, bool, str, list, dict, null, any."""
    literals: tuple[Any, ...] = ()
    unit: type[Epochs] | None = None
    """An object of this class may stand for the number: the same in another unit."""

    @property
    def phrase(self) -> str:
        """What is expected, in words."""
        words = [show_literal(value) for value in self.literals if not str(value).startswith(("None", "torch."))]
        spelled = {_KINDS[type(value)] for value in self.literals}
        names = {
            "bool": "true or false", "int": "a whole number", "float": "a number", "str": "text in quotes",
            "list": "a list", "dict": "an object {...}",
        }  # fmt: skip
        words += [text for kind, text in names.items() if kind in self.kinds and kind not in spelled]
        words += ['{"epochs": 1}'] if self.unit else []
        if self.item and self.item.kinds:
            words = [w if w != "a list" else f"a list of {self.item.plural}" for w in words]
        if len(words) > 1:
            return ", ".join(words[:-1]) + f" or {words[-1]}"
        return words[0] if words else "null" if "null" in self.kinds else "another value"

    @property
    def plural(self) -> str:
        """What is expected of list items, in words."""
        for kind, text in (("float", "numbers"), ("int", "whole numbers"), ("str", "texts"), ("dict", "objects")):
            if kind in self.kinds:
                return f'{text} or {{"epochs": 1}}' if self.unit else text
        return "values"


def show_literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


@cache
def shape(owner: type[Section], key: str) -> Shape:
    """What ``owner`` takes under ``key``."""
    return _shape(owner.model_fields[key].annotation)


_KINDS = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null"}


def _shape(annotation: Any) -> Shape:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _shape(get_args(annotation)[0])
    if origin is Literal:
        values = get_args(annotation)
        return Shape(kinds=frozenset(_KINDS[type(value)] for value in values), literals=values)
    if origin in (Union, types.UnionType):
        every = [_shape(part) for part in get_args(annotation)]
        declared = [part.section for part in every if part.section]
        unit = next((section for section in declared if issubclass(section, Epochs)), None)
        parts = [part for part in every if not unit or part.section is not unit]
        return Shape(
            unit=unit,
            section=next((section for section in declared if section is not unit), None),
            item=next((part.item for part in parts if part.item), None),
            entry=next((part.entry for part in parts if part.entry), None),
            kinds=frozenset().union(*(part.kinds for part in parts)),
            literals=tuple(value for part in parts for value in part.literals),
        )
    if origin is list:
        return Shape(kinds=frozenset({"list"}), item=_shape(get_args(annotation)[0]))
    if origin is dict:
        return Shape(kinds=frozenset({"dict"}), entry=_shape(get_args(annotation)[1]))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Shape(section=annotation, kinds=frozenset({"dict"}))
    if annotation in _KINDS:
        return Shape(kinds=frozenset({_KINDS[annotation]}))
    return Shape(kinds=frozenset({"any"}))


def section_at(owner: type[Section], key: str, raw: Any) -> type[Section] | None:
    """The class that describes the object under ``key``, which may depend on the values beside it."""
    chosen = owner.variant(raw, key) if isinstance(raw, dict) and key in raw else None
    return chosen or shape(owner, key).section


def children(owner: type[Section], raw: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], type[Section], Any]]:
    """Each object below ``raw`` that has a schema, with its path relative to it."""
    for key in [key for key in raw if key in owner.model_fields]:
        value, expected = raw[key], shape(owner, key)
        section = section_at(owner, key, raw) or expected.unit
        inside = expected.item and (expected.item.section or expected.item.unit)
        if section is not None and isinstance(value, dict):
            yield (key,), section, value
        elif inside and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield (key, index), inside, item
        elif expected.entry is not None and expected.entry.section and isinstance(value, dict):
            for name, item in value.items():
                if isinstance(item, dict):
                    yield (key, name), expected.entry.section, item


@cache
def places() -> dict[str, tuple[tuple[str, ...], ...]]:
    """Every key of the schema -> the sections it is legal in, as paths, shortest first."""
    found: dict[str, list[tuple[str, ...]]] = {}
    samples: dict[tuple[str, ...], type[Section]] = {("dsframe", "task"): VisionTask}
    typical: dict[type[Section], tuple[type[Section], ...]] = {
        Optimizer: (DEEPSPEED_OPTIMIZERS["adam"], TORCH_OPTIMIZERS["SGD"]),
        Scheduler: tuple(DEEPSPEED_SCHEDULERS.values()),
    }

    def visit(owner: type[Section], path: tuple[str, ...]) -> None:
        for key in owner.model_fields:
            found.setdefault(key, []).append(path)
            section = samples.get((*path, key)) or shape(owner, key).section
            if section is not None and section is not CustomTask:
                visit(section, (*path, key))
        for parameters in typical.get(owner, ()):
            for key in parameters.model_fields:
                if (*path, "params") not in found.setdefault(key, []):
                    found[key].append((*path, "params"))

    visit(File, ())
    return {key: tuple(sorted(paths, key=len)) for key, paths in found.items()}

"""The JSON Schema that ``dsframe schema`` prints, and what docs/configuration.md says of each key: from the models.

The docstring under a field is its description. They are read from the source, here and only here: validation does not
need them, and reading them through pydantic would double the time of ``dsframe check``.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from dsframe.config.resolve.auto import RULES
from dsframe.config.resolve.batch import MICRO, STEPS, TRAIN
from dsframe.config.schema.base import AUTO, Epochs, Interval, Section
from dsframe.config.schema.file import File, section_at, shape
from dsframe.config.schema.optimizer import SPELLINGS, Optimizer
from dsframe.config.schema.parameters import (
    DEEPSPEED_OPTIMIZERS,
    DEEPSPEED_SCHEDULERS,
    HF_SCHEDULERS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    SchedulePart,
)
from dsframe.config.schema.settings import TASKS, CustomTask


@cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    """Class name -> field -> docstring, of one module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    docs: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            fields = docs.setdefault(node.name, {})
            for field, after in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(after, ast.Expr)
                ):
                    text = getattr(after.value, "value", None)
                    if isinstance(text, str):
                        fields[field.target.id] = " ".join(text.split())
    return docs


def describe(owner: type[Section]) -> dict[str, str]:
    """The docstring of each field, inherited ones included."""
    result: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if issubclass(base, Section) and base.__module__ in sys.modules:
            result.update(_module_docs(base.__module__).get(base.__name__, {}))
    texts = {name: result.get(name) or field.description for name, field in owner.model_fields.items()}
    return {name: text for name, text in texts.items() if text}


def summary(owner: type[Section]) -> str:
    """The docstring of a section."""
    return " ".join((owner.__doc__ or "").split())


def _names(table: Mapping[str, Any]) -> dict[str, list[str]]:
    """Class name of parameters -> the types that take them."""
    grouped: dict[str, list[str]] = {}
    for name, parameters in table.items():
        grouped.setdefault(parameters.__name__, []).append(name)
    return grouped


OPTIMIZER_TYPES = {**dict(zip(SPELLINGS, DEEPSPEED_OPTIMIZERS.values(), strict=True)), **TORCH_OPTIMIZERS}
SCHEDULER_TYPES = {**DEEPSPEED_SCHEDULERS, **TORCH_SCHEDULERS, **HF_SCHEDULERS}


def sections() -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    """Every section with its path, in the order of the file."""

    def visit(owner: type[Section], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], type[Section]]]:
        yield path, owner
        for key in owner.model_fields:
            expected = shape(owner, key)
            if path == ("dsframe",) and key == "task":
                tasks: dict[str, type[Section]] = {**TASKS, "custom": CustomTask}
                for name, task in tasks.items():
                    yield from visit(task, (*path, f"task ({name})"))
            elif section := section_at(owner, key, {}):
                yield from visit(section, (*path, key))
            elif expected.item and expected.item.section:
                yield from visit(expected.item.section, (*path, f"{key}[]"))
            elif expected.entry and expected.entry.section not in (None, Optimizer):  # which has its place above
                yield from visit(expected.entry.section, (*path, f"{key}.NAME"))
        table = {"Optimizer": OPTIMIZER_TYPES, "Scheduler": SCHEDULER_TYPES}.get(owner.__name__, {})
        for name, kinds in _names(table).items():
            parameters = next(cls for cls in table.values() if cls.__name__ == name)
            yield (*path, f"params ({', '.join(kinds)})"), parameters

    return visit(File, ())


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a file."""
    schema = File.model_json_schema()
    definitions = schema["$defs"]
    classes: dict[str, type[Section]] = {"Epochs": Epochs, "Interval": Interval, "SchedulePart": SchedulePart}
    classes |= {cls.__name__: cls for _, cls in sections()}
    for cls in (*classes.values(), *OPTIMIZER_TYPES.values(), *SCHEDULER_TYPES.values()):
        if cls is not File and cls.__name__ not in definitions:
            described = cls.model_json_schema()
            definitions.update(described.pop("$defs", {}))
            definitions[cls.__name__] = described
    paths = dict.fromkeys(classes, ("",)) | {cls.__name__: path for path, cls in sections()}
    definitions["File"] = {key: schema.pop(key) for key in ("properties", "description") if key in schema}
    for name, definition in definitions.items():
        if name in classes:
            _annotate(definition, classes[name], paths[name])
    choices = {"Optimizer": OPTIMIZER_TYPES, "Scheduler": SCHEDULER_TYPES, "SchedulePart": dict(TORCH_SCHEDULERS)}
    for name, types_of in choices.items():
        definitions[name]["properties"]["type"]["examples"] = list(types_of)
        definitions[name]["allOf"] = [
            {
                "if": {"properties": {"type": {"enum": types}}},
                "then": {"properties": {"params": {"$ref": f"#/$defs/{parameters}"}}},
            }
            for parameters, types in _names(types_of).items()
        ]
    top = definitions.pop("File")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "Written by: make docs. Do not edit.",
        "title": "ds_config.json for DeepSpeed 0.19.8 and dsframe",
        "type": "object",
        "additionalProperties": False,
        "properties": {"$schema": {"type": "string", "description": "This schema, for editors."}, **top["properties"]},
        "patternProperties": {"^(_|//|#|comments?$|description$)": {}},
        "$defs": dict(sorted(definitions.items())),
    }


def _annotate(definition: dict[str, Any], owner: type[Section], path: tuple[str, ...]) -> None:
    """Titles out, descriptions and ``"auto"`` in."""
    definition.pop("title", None)
    definition["description"] = summary(owner).replace("``", "`")
    texts = describe(owner)
    home = tuple(part.partition(" ")[0] for part in path)
    for key, value in list(definition.get("properties", {}).items()):
        value.pop("title", None)
        if takes_auto(owner, (*home, key)):
            kept = {name: value.pop(name) for name in ("default", "description") if name in value}
            branches = value["anyOf"] if set(value) == {"anyOf"} else [value]
            value = {"anyOf": [*branches, {"const": AUTO}], **kept}
        if value.get("default", ...) is None:
            del value["default"]
        if key in texts:
            value["description"] = texts[key].replace("``", "`")
        definition["properties"][key] = value


def takes_auto(owner: type[Section], path: tuple[str, ...]) -> bool:
    """Whether ``"auto"`` may stand at ``path``."""
    if ".".join(path) in RULES or (path[-1:] == path and path[0] in (TRAIN, MICRO, STEPS)):
        return True
    expected = shape(owner, path[-1])
    free = expected.section or expected.kinds & {"str", "any", "list", "dict"} or AUTO in expected.literals
    return owner.coerced and not free and path[0] != "dsframe"

"""The JSON Schema, which is made from the models: it accepts what the check accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsframe.cli import main
from dsframe.config.load import examine
from dsframe.config.read.reader import read
from dsframe.tools.schema import json_schema

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLIC = sorted((REPOSITORY.parent / "shared" / "public_ds_configs").glob("*.json"))
OWN = sorted(path for path in (REPOSITORY / "ds_configs").glob("*.json") if "schema" not in path.name)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["schema"])
    assert json.loads(capsys.readouterr().out) == json_schema()


# A validator of the few words of JSON Schema that ours uses, so that the test needs no package for it.

TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int, "number": (int, float),
}  # fmt: skip


def valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    if "$ref" in schema:
        target = root["$defs"][schema["$ref"].rpartition("/")[2]]
        if not valid(value, target, root):
            return False
    kind = schema.get("type")
    if kind is not None:
        if isinstance(value, bool) and kind in ("integer", "number"):
            return False
        integral = kind == "integer" and isinstance(value, float) and value == int(value)
        if not isinstance(value, TYPES[kind]) and not integral:
            return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    for branches, accept in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if branches in schema and not accept(valid(value, branch, root) for branch in schema[branches]):
            return False
    if "if" in schema and valid(value, schema["if"], root) and not valid(value, schema["then"], root):
        return False
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        limits = {
            "minimum": value.__ge__,
            "exclusiveMinimum": value.__gt__,
            "maximum": value.__le__,
            "exclusiveMaximum": value.__lt__,
        }
        if any(word in schema and limit(schema[word]) is False for word, limit in limits.items()):
            return False
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if isinstance(value, dict):
        return _members(value, schema, root)
    if isinstance(value, list):
        sized = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return sized and all(valid(item, schema.get("items", {}), root) for item in value)
    return True


def _members(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    properties = schema.get("properties", {})
    if any(key not in value for key in schema.get("required", ())):
        return False
    for key, item in value.items():
        if key in properties:
            if not valid(item, properties[key], root):
                return False
        elif any(re.search(pattern, key) for pattern in schema.get("patternProperties", {})):
            continue
        elif schema.get("additionalProperties") is False or (
            isinstance(schema.get("additionalProperties"), dict)
            and not valid(item, schema["additionalProperties"], root)
        ):
            return False
    return True


@pytest.mark.parametrize("path", OWN, ids=[path.stem for path in OWN])
def test_own_files_are_clean_and_valid_and_name_the_schema(path: Path) -> None:
    text = path.read_text()
    assert [problem for problem in examine(text, path.name).problems if problem.severity != "note"] == []
    content = read(text).root
    assert valid(content, json_schema(), json_schema())
    assert content.get("$schema") == "./dsframe.schema.json"


def test_an_editor_sees_what_the_check_sees() -> None:
    """Files without errors satisfy the schema (but for forms that are deprecated); a wrong key or type does not."""
    schema = json_schema()
    for path in PUBLIC:
        examined = examine(path.read_text(), path.name)
        if not any(problem.severity != "note" or problem.code == "deprecated" for problem in examined.problems):
            assert examined.document is not None
            assert valid(examined.document.root, schema, schema), path.name
    mistakes: list[dict[str, Any]] = [
        {"zero_optimisation": {}},
        {"zero_optimization": {"stage": 4}},
        {"train_batch_size": "8"},
        {"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}},
        {"optimizer": {"params": {}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
        {"dsframe": {"engine": "x"}},
        {"dsframe": {"task": {"name": "nonsense"}}},
    ]
    for wrong in mistakes:
        assert not valid(wrong, schema, schema), wrong
    files: list[dict[str, Any]] = [
        {"$schema": "x", "_comment": 1, "train_batch_size": "auto"},
        {"zero_optimization": {"reduce_bucket_size": 5e8, "stage": 3}},
        {"dsframe": {"task": {"name": "a.b:C", "options": {"x": 1}}}},
    ]
    for right in files:
        assert valid(right, schema, schema), right

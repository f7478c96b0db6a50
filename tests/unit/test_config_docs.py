"""The JSON Schema, which is made from the models: it accepts what the check accepts."""

import json

import pytest
from jsonschema import Draft202012Validator

from docs.schema import json_schema
from dsframe.cli import main
from dsframe.config.load import examine
from dsframe.config.read.reader import read
from tests.unit.test_config_reader import OWN


def test_the_command_prints_it(capsys):
    main(["schema"])
    assert json.loads(capsys.readouterr().out) == json_schema()


@pytest.mark.parametrize("path", OWN, ids=[path.stem for path in OWN])
def test_own_files_are_clean_and_valid_and_name_the_schema(path):
    text = path.read_text()
    assert [problem for problem in examine(text, path.name).problems if problem.severity != "note"] == []
    content = read(text).root
    assert Draft202012Validator(json_schema()).is_valid(content)
    assert content.get("$schema") == "./dsframe.schema.json"


def test_an_editor_sees_what_the_check_sees():
    """A wrong key or type does not satisfy the schema; what may be written does."""
    schema = Draft202012Validator(json_schema())
    for wrong in (
        {"zero_optimisation": {}},
        {"zero_optimization": {"stage": 4}},
        {"train_batch_size": "8"},
        {"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
        {"dsframe": {"task": {"name": "nonsense"}}},
    ):
        assert not schema.is_valid(wrong), wrong
    for right in (
        {"$schema": "x", "_comment": 1, "train_batch_size": "auto"},
        {"zero_optimization": {"reduce_bucket_size": 5e8, "stage": 3}},
        {"dsframe": {"task": {"name": "a.b:C", "options": {"x": 1}}}},
    ):
        assert schema.is_valid(right), right

"""Combinations, one by one (check_rules.json): which key is named, and how serious it is. Messages: test_check_mistakes."""

import json
from pathlib import Path

import pytest

from dsframe.config.load import examine
from dsframe.config.rules import system, table
from dsframe.config.schema.conditions import value_at
from dsframe.config.schema.file import File, section_at
from tests.files import ds_config, read_json

CASES = read_json(Path(__file__).with_name("check_rules.json"))


@pytest.mark.parametrize(("keys", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_rule(keys, expected, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problems = examine(json.dumps({"train_batch_size": 8, **keys}), "x.json").problems
    assert [f"{p.severity[0].upper()} {p.code} {p.path}" for p in problems if p.severity != "note"] == expected


def test_the_table_names_keys_that_there_are():
    rows = [*table.table()["rules"], *table.table()["conditions"].values()]
    paths = {path for row in rows for path in (row.get("key"), *row.get("with", {}), *row.get("without", {})) if path}
    free = (
        "optimizer.params.",
        "scheduler.params.",
        "dsframe.task.",
        "checkpoint.writer.",
        "zero_optimization.optimizer",
        "zero_optimization.parameter_",
    )
    for path in {path for path in paths | table.table()["excludes"].keys() if not path.startswith(free)}:
        owner = File
        for key in path.split("."):
            assert key in owner.model_fields, path
            owner = section_at(owner, key, {})


def test_options_of_an_engine_that_the_launcher_may_choose_have_an_effect():
    assert examine('{"train_batch_size": 8, "dsframe": {"ddp": {"communication": "bf16"}}}', "x.json").problems == ()


def test_values_of_what_is_absent():
    file = File.model_construct()
    assert value_at(file, "zero_optimization.offload_optimizer.device") is None
    assert value_at(file, "optimizer.type") is None


def test_a_file_that_names_code_says_so():
    content = ds_config(
        8,
        "mine:Fast",
        0.1,
        sections={"scheduler": {"type": "LambdaLR", "params": {"lr_lambda": "mine:rate"}}},
        engine="single",
        task={"name": "circles:Circles"},
    )
    notes = [problem for problem in examine(json.dumps(content), "x.json").problems if problem.code == "imports"]
    assert {(p.severity, p.path, p.message) for p in notes} == {
        ("note", "dsframe.task.name", "imports and runs code: circles"),
        ("note", "optimizer.type", "imports and runs code: mine"),
        ("note", "scheduler.params.lr_lambda", "imports and runs code: mine"),
    }


def test_gpu_direct_storage_needs_cuda(monkeypatch, tmp_path):
    text = json.dumps({"train_batch_size": 8, "aio": {"use_gds": True}})
    monkeypatch.setattr(system, "NVIDIA_DRIVER", tmp_path / "absent")
    assert [problem.path for problem in examine(text, "x.json").problems] == ["aio.use_gds"]
    monkeypatch.setattr(system, "NVIDIA_DRIVER", tmp_path)
    assert examine(text, "x.json").problems == ()


@pytest.mark.parametrize("section", ["comet", "csv_monitor", "flops_profiler", "comms_logger"])
def test_what_only_watches_has_no_effect_and_says_so(section):
    problems = examine(json.dumps({"train_batch_size": 8, section: {"enabled": True}}), "x.json").problems
    assert [(p.severity, p.code, p.path) for p in problems] == [("note", "no-effect", f"{section}.enabled")]

"""A run parses its file once, examines it once and chooses its engine once."""

import sys

import pytest

from dsframe.config import Facts, load


def test_what_is_asked_of_a_config_parses_nothing(monkeypatch):
    config = load("zero3.json")
    monkeypatch.setattr(sys.modules["dsframe.config.load"], "read", None)
    assert config.position(("zero_optimization", "stage"))[0] > 1
    assert config.batch(2).train_batch_size
    assert [feature.line for feature in config.features if feature.name == "zero3"] != [0]
    assert config.resolve(Facts(2, 100, None)).resolve(Facts(4, 100, None)).facts.world_size == 4


@pytest.mark.parametrize("name", ["zero3.json", "gpt_zero2.json", "llama_zero3.json", "pipeline.json"])
def test_resolving_says_what_an_examination_would(name):
    facts = Facts(2, 100, 64, replicas=False)
    resolved, whole = load(name).resolve(facts), load(name, facts=facts)
    assert resolved.problems == whole.problems
    assert resolved == whole
    assert resolved.for_deepspeed(2) == whole.for_deepspeed(2)

"""A run parses its file once, examines it once and chooses its engine once."""

import json
import sys

import pytest

from dsframe.config import Facts, load
from tests.files import ds_config, write_json
from tests.processes import run_ranks, warm

COUNTED = """
import importlib, json, sys
from collections import Counter

counts = Counter()
for module, name in (
    ("dsframe.config.load", "read"), ("dsframe.config.load", "_validate"), ("dsframe.config.rules", "check"),
    ("dsframe.config.read.validate", "validate"), ("dsframe.engines", "choose"), ("dsframe.engines", "examine"),
):
    owner = importlib.import_module(module) if module != "dsframe.config.load" else (
        importlib.import_module("dsframe.config"), sys.modules["dsframe.config.load"])[1]
    def counted(*arguments, original=getattr(owner, name), name=name, **options):
        counts[name] += 1
        return original(*arguments, **options)
    setattr(owner, name, counted)
from dsframe.train import main
from tests.engines.norm_task import Normed
main(Normed(), ["--config", sys.argv[1], "--quiet", "--run-dir", "run", "--engine", "single"])
print(json.dumps(counts))
"""


@pytest.mark.parametrize("auto", [False, True])
def test_a_run_reads_its_file_once(auto, tmp_path):
    """Examined once more only where the file has an "auto", which may become something else when the model is known."""
    file = ds_config(16, "AdamW", 0.01, sections={"gradient_clipping": "auto" if auto else 1.0}, steps=2)
    write_json(tmp_path / "file.json", file)
    (tmp_path / "counted.py").write_text(COUNTED)
    done = run_ranks(warm(1, ["counted.py", "file.json"]), cwd=tmp_path, timeout_seconds=120).check()
    once = 2 if auto else 1
    expected = {"read": 1, "_validate": once, "check": once, "validate": once, "choose": 1, "examine": 1}
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_what_is_asked_of_a_config_parses_nothing(monkeypatch):
    config = load("zero3.json")
    monkeypatch.setattr(sys.modules["dsframe.config.load"], "read", None)
    assert config.position(("zero_optimization", "stage"))[0] > 1
    assert config.batch(2).train_batch_size
    assert [feature.line for feature in config.features if feature.name == "zero3"] != [0]
    assert config.resolve(Facts(2, 100)).resolve(Facts(4)).facts == Facts(4, 100)


@pytest.mark.parametrize("name", ["zero3.json", "gpt_zero2.json", "llama_zero3.json", "pipeline.json"])
def test_resolving_says_what_an_examination_would(name):
    facts = Facts(2, 100, 64, replicas=False)
    resolved, whole = load(name).resolve(facts), load(name, facts=facts)
    assert resolved.problems == whole.problems
    assert resolved == whole
    assert resolved.for_deepspeed(2) == whole.for_deepspeed(2)

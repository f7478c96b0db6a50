"""Checkpoints of real engines, at once and in the background: what is in them, and what goes on from them, to the last bit."""

import json

import pytest
import torch

from dsframe.tools import export
from tests import kept
from tests.engines.saved import configuration
from tests.files import read_json, write_json, zero
from tests.processes import run_ranks, warm
from tests.text_files import LLAMA

TASK = {"name": "causal-language-model", "model": LLAMA, "context": 32, "corpus": "synthetic", "samples": 200}
BF16 = {"bf16": {"enabled": True}}
CPU = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
PIPELINE = {"pipeline": {"stages": 2}}


def by(kind, **params):
    return {"optimizer": {"type": kind, "params": {"lr": 0.01, **params}}, "zero_allow_untested_optimizer": True}


SETUPS = {
    "ddp-bf16": (2, "ddp", BF16),
    "horovod": (2, "horovod", {}),
    "zero0-bf16": (2, "deepspeed", {**zero(0), **BF16}),
    "zero1": (2, "deepspeed", zero(1)),
    "zero1-adagrad": (2, "deepspeed", {**zero(1), **by("Adagrad")}),
    "zero2-cpu": (2, "deepspeed", zero(2, offload_optimizer={"device": "cpu"})),
    "zero3": (3, "deepspeed", {**zero(3, sub_group_size=200), "train_batch_size": 6, "gradient_accumulation_steps": 1}),
    "zero3-sgd": (2, "deepspeed", {**zero(3), **by("SGD", momentum=0.9)}),
    "zero3-cpu": (2, "deepspeed", {**zero(3, **CPU), **BF16}),
    "fsdp-bf16-cpu": (2, "fsdp", {**BF16, "dsframe": {"fsdp": {"wrap": ["Linear"], "offload": "cpu"}}}),
    "fsdp-hybrid": (
        4,
        "fsdp",
        {"dsframe": {"fsdp": {"sharding": "hybrid", "shard_size": 2}}, "gradient_accumulation_steps": 1},
    ),
    "pipeline": (2, "deepspeed", PIPELINE),
    "pipeline-zero1": (4, "deepspeed", {**PIPELINE, **zero(1)}),
}


SLACK_BYTES = 24 << 20


@pytest.mark.parametrize("case", SETUPS)
def test_every_way_writes_the_same_files(case, tmp_path):
    ranks, engine, changes = SETUPS[case]
    assert forms(ranks, configuration(engine, changes, 19), tmp_path)["same files"]


def forms(ranks, config, folder, timeout_seconds=150):
    """Runs tests.engines.forms; whatever the engine, each way holds the state and goes on from it."""
    write_json(folder / "config.json", config)
    command = warm(ranks, ["-m", "tests.engines.forms", "config.json"])
    run_ranks(command, timeout_seconds=timeout_seconds, cwd=folder).check()
    report = read_json(folder / "report.json")
    assert report["differences"] == {name: [0.0, 0.0] for name in report["differences"]}
    assert report["damaged"] == []
    assert len(report["after"]) == 2
    for name, (losses, equal) in report["repeated"].items():
        assert all(losses == after for after in report["after"]), name
        assert equal, name
    assert list(report["refused"]) == list(report["differences"])
    for text in report["refused"].values():
        assert "cannot be written: rank 1: " in text
        assert "No space left on device; the last good one is run/step-00000003" in text
    assert report["left"] == ["latest", *(f"step-{step:08}" for step in range(1, 4))]
    return report


def test_a_save_takes_a_window_and_a_load_its_own_pages(tmp_path):
    """Of a parameter that is far larger than the window."""
    config = configuration("deepspeed", zero(3), 4000)
    write_json(tmp_path / "config.json", config)
    run_ranks(warm(2, ["-m", "tests.engines.save_memory", "config.json"]), timeout_seconds=150, cwd=tmp_path).check()
    report = read_json(tmp_path / "report.json")
    share = report["share"]
    assert report["at once"] < SLACK_BYTES < share
    assert report["kept"] < share + SLACK_BYTES
    assert report["loaded"] < 1.1 * share + SLACK_BYTES


def test_a_folder_of_training_is_one_of_transformers(tmp_path):
    import transformers

    words = ["--config", "zero3.json", "--engine", "fsdp", "--run-dir", "run", "--set", "dsframe.steps=2"]
    words += ["--set", f"dsframe.task={json.dumps(TASK)}"]
    kept.run(tmp_path, words, 2).check()
    path = tmp_path / "run" / "checkpoints" / "step-00000002"
    read, told = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(told.values()), told
    out = tmp_path / "huggingface"
    assert export.main([str(tmp_path / "run"), "--to", "huggingface", "--out", str(out)]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert read.state_dict().keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in read.state_dict().items())

"""Files of Accelerate, Hugging Face's Trainer and Lightning become files of dsframe, and what is not taken is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as given_
from hypothesis import settings
from hypothesis import strategies as st

from dsframe.config import load
from dsframe.errors import ConfigError
from dsframe.tools.convert import convert, main
from tests.files import read_json, write_json


def given(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


DEEPSPEED = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
mixed_precision: bf16
num_machines: 2
num_processes: 16
downcast_bf16: 'no'
use_cpu: false
megatron_lm_config: {megatron_lm_tp_degree: 2}
"""
FSDP = """
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,Other
  fsdp_offload_params: true
  fsdp_backward_prefetch: BACKWARD_PRE
mixed_precision: bf16
num_processes: 4
"""


def test_accelerate_with_deepspeed(tmp_path: Path) -> None:
    found = convert(given(tmp_path, "a.yaml", DEEPSPEED))
    assert found.document == {
        "dsframe": {"engine": "deepspeed"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
    }
    assert found.processes == 16
    left = found.of("to do")
    assert left["megatron_lm_config"] == "no counterpart is known"
    assert "the launcher" in left["num_machines"]
    assert {"the batch size", "the optimizer and its schedule"} <= left.keys()
    assert {"zero3_init_flag", "use_cpu", "downcast_bf16"} <= found.of("nothing to do").keys()
    load(found.document)


def test_accelerate_with_fsdp(tmp_path: Path) -> None:
    found = convert(given(tmp_path, "a.yml", FSDP))
    assert found.document["dsframe"] == {
        "engine": "fsdp",
        "inherit": "torch",
        "fsdp": {"sharding": "hybrid", "wrap": ["LlamaDecoderLayer", "Other"], "offload": "cpu"},
    }
    assert found.document["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    load(found.document)


def test_a_ds_config_stays_as_it_is(tmp_path: Path) -> None:
    own = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": 4}
    write_json(tmp_path / "ds.json", own)
    text = DEEPSPEED.replace("  zero_stage: 3", "  deepspeed_config_file: ds.json\n  zero_stage: 3")
    found = convert(given(tmp_path, "a.yaml", text))
    assert found.document["zero_optimization"]["stage"] == 2
    assert found.document["gradient_clipping"] == 1.0
    assert found.of("to do")["zero_stage"] == "the file has zero_optimization.stage = 2, which stays; it said 3"
    with pytest.raises(ConfigError, match=r"names the ds_config gone\.json, which does not exist"):
        convert(given(tmp_path, "b.yaml", text.replace("ds.json", "gone.json")))


ARGUMENTS = """
{"output_dir": "out", "per_device_train_batch_size": 16, "learning_rate": 2e-4, "weight_decay": 0.1, "warmup_ratio": 0.03,
 "num_train_epochs": 2, "lr_scheduler_type": "cosine", "logging_steps": 5, "evaluation_strategy": "epoch",
 "save_strategy": "epoch", "save_total_limit": 3, "metric_for_best_model": "eval_loss", "bf16": true,
 "gradient_checkpointing": true, "report_to": ["tensorboard", "swanlab"], "push_to_hub": true,
 "dataloader_num_workers": 4, "frobnicate": 3}
"""


def test_the_trainers_arguments(tmp_path: Path) -> None:
    found = convert(given(tmp_path, "train.json", ARGUMENTS))
    document = found.document
    assert document["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": 2e-4, "weight_decay": 0.1, "eps": 1e-8, "betas": [0.9, 0.999]},
    }
    assert document["scheduler"] == {
        "type": "cosine",
        "params": {"num_warmup_steps": 0.03, "num_training_steps": "auto"},
    }
    assert document["dsframe"] == {
        "engine": "ddp",
        "run_dir": "out",
        "seed": 42,
        "epochs": 2,
        "log_every_steps": 5,
        "eval_every_steps": {"epochs": 1},
        "checkpoints": {"keep_last": 3, "every_steps": {"epochs": 1}, "keep_best": "loss:min"},
        "no_decay": "norms-and-biases",
        "model": {"activation_checkpointing": True},
    }
    assert (document["train_micro_batch_size_per_gpu"], document["gradient_clipping"]) == (16, 1.0)
    left = found.of("to do")
    assert left["frobnicate"] == "no counterpart is known"
    assert "swanlab" in left["report_to"]
    assert "dsframe.task" in left["dataloader_num_workers"]
    task = {"name": "tests.faults.slow_task:SlowTask"}
    load({**document, "dsframe": {**document["dsframe"], "task": task}})


NAMES = st.sampled_from(
    ["learning_rate", "warmup_ratio", "warmup_steps", "bf16", "eval_strategy", "frobnicate", "save_steps", "report_to", "fsdp",
     "optim", "max_steps", "metric_for_best_model", "lr_scheduler_type", "logging_steps", "greater_is_better"]
)  # fmt: skip
VALUES = st.sampled_from([None, False, True, 3, 0.5, "no", "steps", "auto"])


@given_(words=st.dictionaries(NAMES, VALUES))
@settings(max_examples=300, deadline=None)
def test_no_argument_is_dropped(words: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever stands in a file is named in what the command prints."""
    folder = tmp_path_factory.getbasetemp()
    source = given(folder, "any.json", json.dumps({"output_dir": "out", **words}))
    said = " ".join(name for _, name, _ in convert(source).entries)
    assert [name for name in words if name not in said] == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "cannot be read: Expecting property name"),
        ("a.json", "[1]", "holds list where keys and values are expected"),
        ("a.json", '{"seed": 1}', "is neither an Accelerate configuration"),
        ("a.yaml", "a: [", "cannot be read: line 1: "),
        ("a.yaml", "a:\n\tb: 1", "line 2: found character"),
        ("a.yaml", "a: 1\nb: 2026-11-26", "line 2: timestamp is no value of JSON"),
        ("a.yaml", "a: 1\na: 2", "line 2: duplicate key a"),
        ("a.yaml", "a: !!binary aGVsbG8=", "binary is no value of JSON"),
        ("a.yaml", "a: .nan", "not JSON compliant"),
        ("a.toml", "a = 2026-11-26", "date is not JSON serializable"),
        ("a.py", "x = 1", "cannot be read: Expecting value"),
    ],
)
def test_mistakes(name: str, text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        convert(given(tmp_path, name, text))
    with pytest.raises(ConfigError, match="cannot be read"):
        convert(tmp_path / "nothing.json")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    source = given(tmp_path, "a.yaml", DEEPSPEED)
    assert main([str(source), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "  zero_stage: zero_optimization.stage = 3\n" in said
    assert "nothing to do:\n" in said
    assert "  zero3_init_flag: dsframe does so" in said
    assert f"To start it: dsframe launch -np 16 --config {out}" in said
    assert read_json(out)["dsframe"]["task"] == {"name": "my_module:MyTask"}
    with pytest.raises(ConfigError, match="exists already"):
        main([str(source), "--out", str(out)])
    assert main([str(source)]) == 0
    assert json.loads(capsys.readouterr().out)["zero_optimization"]["stage"] == 3

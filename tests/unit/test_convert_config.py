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
from dsframe.tools import convert_config
from dsframe.tools.convert_config import convert


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
    (tmp_path / "ds.json").write_text(json.dumps(own))
    text = DEEPSPEED.replace("  zero_stage: 3", "  deepspeed_config_file: ds.json\n  zero_stage: 3")
    found = convert(given(tmp_path, "a.yaml", text))
    assert found.document["zero_optimization"]["stage"] == 2
    assert found.document["gradient_clipping"] == 1.0
    assert found.of("to do")["zero_stage"] == "the file has zero_optimization.stage = 2, which stays; it said 3"
    with pytest.raises(ConfigError, match=r"names the ds_config gone\.json, which does not exist"):
        convert(given(tmp_path, "b.yaml", text.replace("ds.json", "gone.json")))


CALL = """
from transformers import TrainingArguments
args = TrainingArguments(
    "out", per_device_train_batch_size=16, learning_rate=2e-4, weight_decay=0.1, warmup_ratio=0.03, num_train_epochs=2,
    lr_scheduler_type="cosine", logging_steps=5, evaluation_strategy="epoch", save_strategy="epoch", save_total_limit=3,
    metric_for_best_model="eval_loss", bf16=True, gradient_checkpointing=True, report_to=["tensorboard", "swanlab"],
    gradient_accumulation_steps=steps, push_to_hub=True, dataloader_num_workers=4, frobnicate=3)
"""


def test_the_trainers_call(tmp_path: Path) -> None:
    found = convert(given(tmp_path, "train.py", CALL))
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
    assert left["gradient_accumulation_steps"].startswith("its value is not written in the call; write gradient_acc")
    assert left["frobnicate"] == "no counterpart is known"
    assert "swanlab" in left["report_to"]
    assert "dsframe.task" in left["dataloader_num_workers"]
    task = {"name": "tests.faults.slow_task:SlowTask"}
    load({**document, "dsframe": {**document["dsframe"], "task": task}})


def test_a_notebook(tmp_path: Path) -> None:
    cells: list[Any] = [
        {"cell_type": "code", "source": ["!pip install transformers\n", "%time\n"]},
        {"cell_type": "markdown", "source": ["# args = TrainingArguments("]},
        {"cell_type": "code", "source": ["args = TrainingArguments(output_dir='x', max_steps=7)"]},
    ]
    assert convert(given(tmp_path, "a.ipynb", json.dumps({"cells": cells}))).document["dsframe"]["steps"] == 7


LIGHTNING = """
from lightning import LightningModule, Trainer
class Model(LightningModule):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=args.lr, betas=(0.9, 0.95), frob=1)
    def train_dataloader(self):
        return DataLoader(data, batch_size=32, shuffle=True, num_workers=4, collate_fn=pad, drop_last=True)
    def val_dataloader(self):
        return DataLoader(held_out, batch_size=64)
parser.add_argument("--lr", type=float, default=3e-4)
seed_everything(7)
trainer = Trainer(devices=4, num_nodes=2, max_epochs=3, precision="bf16-mixed", accumulate_grad_batches=2, val_check_interval=0.5,
    log_every_n_steps=10, gradient_clip_val=0.5, logger=WandbLogger(project="mine"), enable_progress_bar=False, frobnicate=1,
    callbacks=[EarlyStopping("val_loss", patience=5), ModelCheckpoint(monitor="val_acc", mode="max", save_top_k=3,
    every_n_epochs=2),
               LearningRateMonitor(), MyCallback(3)], limit_train_batches=0.1, profiler="simple")
"""


def test_lightning_with_all_that_it_names(tmp_path: Path) -> None:
    found = convert(given(tmp_path, "a.py", LIGHTNING))
    assert found.document == {
        "dsframe": {
            "engine": "ddp",
            "inherit": "torch",
            "epochs": 3,
            "eval_every_steps": {"epochs": 0.5},
            "log_every_steps": 10,
            "seed": 7,
            "eval_micro_batch_size": 64,
            "stop": {"metric": "loss:min", "patience": 5},
            "checkpoints": {"keep_best": "acc:max", "every_steps": {"epochs": 2}},
        },
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
        "train_micro_batch_size_per_gpu": 32,
        "dataloader_drop_last": True,
        "wandb": {"enabled": True, "project": "mine"},
    }
    assert found.processes == 8
    left = found.of("to do")
    assert left["callbacks"].startswith("MyCallback(3): ")
    assert {"frobnicate", "limit_train_batches", "profiler", "DataLoader(collate_fn)", "AdamW(frob)"} <= left.keys()
    assert "ModelCheckpoint(save_top_k)" in found.of("changed")
    assert {"enable_progress_bar", "LearningRateMonitor"} <= found.of("nothing to do").keys()
    load(found.document)


@pytest.mark.parametrize(
    ("arguments", "callback", "every", "kept"),
    [
        ("val_check_interval=0.5", "", {"epochs": 0.5}, None),
        ("check_val_every_n_epoch=2", "", {"epochs": 2}, None),
        ("val_check_interval=100", "save_top_k=-1", 100, 100),
        ("val_check_interval=0.5", "every_n_train_steps=40, save_top_k=-1", 40, 40),
        ("", "", {"epochs": 1}, None),
    ],
)
def test_lightning_saves_after_each_evaluation(
    arguments: str, callback: str, every: Any, kept: Any, tmp_path: Path
) -> None:
    """So that the best evaluation has its checkpoint."""
    text = f"t = L.Trainer(max_epochs=3, {arguments})\nc = ModelCheckpoint({callback})"
    saves = convert(given(tmp_path, "a.py", text)).document["dsframe"]["checkpoints"]
    assert (saves["every_steps"], saves.get("keep_every")) == (every, kept)


def test_lightning_with_deepspeed(tmp_path: Path) -> None:
    text = "t = L.Trainer(strategy=DeepSpeedStrategy(stage=3, offload_optimizer=True, reduce_bucket_size=1000000))"
    document = convert(given(tmp_path, "a.py", text)).document
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000000}
    assert (document["zero_optimization"], document["dsframe"]["engine"]) == (zero, "deepspeed")
    text = "Trainer(strategy='deepspeed_stage_2_offload', gradient_clip_val=0.5, precision='16-true')"
    document = convert(given(tmp_path, "b.py", text)).document
    assert document["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert (document["gradient_clipping"], document["fp16"]) == (0.5, {"enabled": True})


ACCELERATOR = """
accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="fp16", log_with="tensorboard", project_dir="x")
config = {"lr": 2e-5, "seed": 3}
set_seed(config["seed"])
optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
train = DataLoader(data, shuffle=True, collate_fn=c, batch_size=8)
test = DataLoader(data, collate_fn=c, batch_size=16)
scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=100, num_training_steps=len(train) * 3)
model, optimizer, train = accelerator.prepare(model, optimizer, train)
accelerator.clip_grad_norm_(model.parameters(), 1.0)
"""


def test_a_loop_with_an_accelerator(tmp_path: Path) -> None:
    found = convert(given(tmp_path, "loop.py", ACCELERATOR))
    assert found.document == {
        "dsframe": {"engine": "ddp", "inherit": "torch", "seed": 3, "eval_micro_batch_size": 16},
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "tensorboard": {"enabled": True},
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
        "train_micro_batch_size_per_gpu": 8,
        "scheduler": {"type": "linear", "params": {"num_training_steps": "auto", "num_warmup_steps": 100}},
        "gradient_clipping": 1.0,
    }
    assert "once for each optimizer step" in found.of("changed")["get_scheduler"]
    load(found.document)


TRAINER = """
trainer = Trainer(model, TrainingArguments("out", load_best_model_at_end=True, metric_for_best_model="eval_f1",
    eval_strategy="steps", eval_steps=50), data_collator=pad, train_dataset=rows, compute_metrics=metrics,
    peft_config=LoraConfig(r=16, lora_alpha=32),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=4), transformers.ProgressCallback, Mine()])
trainer.train(resume_from_checkpoint=True)
"""


def test_the_trainers_callbacks_and_metrics(tmp_path: Path) -> None:
    found = convert(given(tmp_path, "a.py", TRAINER))
    ours = found.document["dsframe"]
    assert ours["stop"] == {"metric": "f1:max", "patience": 4}
    assert ours["checkpoints"]["keep_best"] == "f1:max"
    assert ours["adapter"] == {"r": 16, "lora_alpha": 32}
    left = found.of("to do")
    assert left["train(resume_from_checkpoint)"].startswith("write --resume auto")
    assert {
        "model",
        "Trainer(model)",
        "Trainer(data_collator)",
        "Trainer(train_dataset)",
        "Trainer(compute_metrics)",
    } - {"model"} <= (left.keys())
    said = [text for kind, name, text in found.entries if name == "Trainer(callbacks)" and kind == "to do"]
    assert [text.partition(":")[0] for text in said] == ["transformers.ProgressCallback", "Mine()"]


NAMES = st.sampled_from(
    ["callbacks", "logger", "learning_rate", "warmup_ratio", "bf16", "eval_strategy", "frobnicate", "precision", "max_epochs",
     "save_steps", "report_to", "strategy", "plugins", "fsdp", "optim", "data_collator", "profiler", "mixed_precision", "log_with",
     "stage", "devices", "max_steps", "deterministic", "accumulate_grad_batches", "kwargs_handlers", "metric_for_best_model"]
)  # fmt: skip
VALUES = st.sampled_from(
    ["x.y", "[A(), b]", "None", "False", "True", "3", "0.5", "'no'", "'steps'", "'auto'", "compute()"]
)


@given_(call=st.sampled_from(["TrainingArguments", "Trainer", "Accelerator"]), words=st.dictionaries(NAMES, VALUES))
@settings(max_examples=300, deadline=None)
def test_no_argument_is_dropped(call: str, words: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever stands in a call is named in what the command prints."""
    folder = tmp_path_factory.getbasetemp()
    source = f"{call}({', '.join(f'{name}={value}' for name, value in words.items())})"
    said = " ".join(name for _, name, _ in convert(given(folder, "any.py", source)).entries)
    for name in words:
        assert name in said, (name, source, said)


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
        ("a.py", "x = (", "is not Python"),
        ("a.py", "x = 1", "has no call of TrainingArguments"),
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
    assert convert_config.main([str(source), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "  zero_stage: zero_optimization.stage = 3\n" in said
    assert "nothing to do:\n" in said
    assert "  zero3_init_flag: dsframe does so" in said
    assert f"To start it: dsframe launch -np 16 --config {out}" in said
    assert json.loads(out.read_text())["dsframe"]["task"] == {"name": "my_module:MyTask"}
    with pytest.raises(ConfigError, match="exists already"):
        convert_config.main([str(source), "--out", str(out)])
    assert convert_config.main([str(source)]) == 0
    assert json.loads(capsys.readouterr().out)["zero_optimization"]["stage"] == 3


def test_the_second_loader_of_a_call_is_for_validation(tmp_path: Path) -> None:
    """Its shuffle was taken for the training's, which then read its samples in their order."""
    loaders = "DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=64)"
    found = convert(given(tmp_path, "a.py", f"Trainer(max_epochs=1).fit(Net(), {loaders})")).document
    assert (found["train_micro_batch_size_per_gpu"], found["dsframe"]["eval_micro_batch_size"]) == (32, 64)
    assert "order" not in found["dsframe"]
    lengths = [entry[1] for entry in convert(given(tmp_path, "b.py", "Accelerator()")).entries if entry[0] == "to do"]
    assert "the length" in lengths, "one epoch was trained without a word"

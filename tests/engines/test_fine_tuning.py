"""One file fine-tunes a model of a folder on conversations, offline: the same losses on every engine, and those of transformers'
own Trainer on the same rows."""

from typing import Any

import pytest
import torch

from dsframe.config import load
from dsframe.data import Loader
from dsframe.run_dir.record import read_summary
from dsframe.tasks import build
from dsframe.tools.compare import losses
from dsframe.tools.export import main as export
from tests import kept
from tests.files import ds_config, write_json
from tests.text_files import LLAMA, conversations, jsonl, tokenizer

STEPS, BATCH, RATE = 20, 8, 1e-3
TASK = {
    "name": "causal-language-model",
    "model": "llama",
    "context": 96,
    "data_dir": "cache",
    "data": {"train": "chats.jsonl", "eval": "held_out.jsonl", "format": "conversations"},
}
FILE = ds_config(
    BATCH,
    {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}},
    sections={
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "scheduler": {"type": "linear", "params": {"num_warmup_steps": 3, "num_training_steps": STEPS}},
    },
    task=TASK,
    steps=STEPS,
    seed=5,
    log_every_steps=1,
    no_decay="norms-and-biases",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The file, the conversations, and a folder with a Llama and its tokenizer, as they are downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    here = tmp_path_factory.mktemp("fine_tuning")
    torch.manual_seed(3)
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    LlamaForCausalLM(LlamaConfig(**settings, vocab_size=400)).save_pretrained(here / "llama")
    tokenizer(here / "llama")
    jsonl(here / "chats.jsonl", conversations(120))
    jsonl(here / "held_out.jsonl", conversations(19, seed=1))
    write_json(here / "my.json", FILE)
    return here


def trained(folder, name, engine, file=FILE, **settings):
    processes = 1 if engine == "single" else 2
    own = {"dsframe": {**file["dsframe"], "engine": engine, "run_dir": name, **settings}}
    kept.train(folder, file | own, processes).check()
    return losses(folder / name), read_summary(folder / name)["metrics"]


@pytest.fixture(scope="module")
def alone(folder):
    return trained(folder, "single", "single")


def test_every_engine_has_the_same_losses(folder, alone):
    expected, evaluated = alone
    assert len(expected) == STEPS
    assert expected[STEPS] < expected[1] - 0.1
    for engine in ("deepspeed", "fsdp", "horovod"):
        found, metrics = trained(folder, engine, engine)
        assert found == pytest.approx(expected, abs=2e-5), engine
        assert metrics == pytest.approx(evaluated, abs=2e-5), engine


class Rows(torch.utils.data.Dataset[Any]):
    """The rows of the run in their order, as the Trainer takes them: labels are not moved by one."""

    def __init__(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        config = load("my.json")
        task = build(config.settings.task, config.settings.seed)
        self.rows = []
        loader = Loader(task.train_data(), seed=config.settings.seed, micro_batch_size=BATCH)
        for inputs, targets in loader.stream(0, STEPS):
            for ids, wanted, mask in zip(inputs["input_ids"], targets, inputs["attention_mask"], strict=True):
                length = int(mask.sum())
                last = wanted[length - 1 : length].clamp(min=0)
                labels = torch.cat([torch.tensor([-100]), wanted[:length]])
                self.rows.append({"input_ids": torch.cat([ids[:length], last]).tolist(), "labels": labels.tolist()})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def by_the_trainer(folder, model, monkeypatch):
    """The losses of transformers' own Trainer on the same rows, which goes on training ``model``."""
    pytest.importorskip("accelerate", reason='transformers\' Trainer needs accelerate: pip install -e ".[bench]"')
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    found = []

    class Recording(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments, **more):
            loss = super().training_step(*arguments, **more)
            found.append(float(loss))
            return loss

    Recording(
        model,
        TrainingArguments(
            str(folder / "trainer"),
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=RATE,
            weight_decay=0.1,
            warmup_steps=3,
            lr_scheduler_type="linear",
            max_grad_norm=1.0,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        ),
        data_collator=DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(folder / "llama")),
        train_dataset=Rows(folder, monkeypatch),
    ).train()
    assert len(found) == STEPS
    return found


def base(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)


def test_the_trainer_of_transformers_has_the_same_losses(folder, alone, monkeypatch):
    found = by_the_trainer(folder, base(folder), monkeypatch)
    assert found == pytest.approx([alone[0][step] for step in range(1, STEPS + 1)], abs=1e-5)


@pytest.mark.filterwarnings("ignore")  # peft's own
@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp", marks=pytest.mark.long)])
def test_peft_and_the_trainer_have_the_same_losses_and_folders(engine, folder, monkeypatch):
    """LoRA at ZeRO-3 and under FSDP begins with a folder of peft's, and ends with one that peft loads as its own training."""
    import peft

    torch.manual_seed(7)
    targets = ["q_proj", "v_proj", "embed_tokens"]
    model = peft.get_peft_model(base(folder), peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    model.save_pretrained(str(folder / f"peft-{engine}"), save_embedding_layers=False)
    found, metrics = trained(folder, f"lora-{engine}", engine, adapter={"folder": f"peft-{engine}"})
    expected = by_the_trainer(folder, model, monkeypatch)
    assert expected[-1] < expected[0]
    assert list(found.values()) == pytest.approx(expected, abs=1e-5)
    assert export([f"lora-{engine}", "--to", "peft", "--out", f"ours-{engine}"]) == 0
    ours = peft.PeftModel.from_pretrained(base(folder), str(folder / f"ours-{engine}"))
    theirs = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    for name, tensor in peft.get_peft_model_state_dict(ours, save_embedding_layers=False).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-4)
    assert metrics["loss"] < expected[0]

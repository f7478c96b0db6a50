"""Arguments of the Hugging Face Trainer, converted, have the Trainer's rates in all steps, its weight decay and its losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsframe.config import Config, Facts, load
from dsframe.data.sampler import Sampler
from dsframe.model import groups, schedules
from dsframe.tools.convert import convert
from tests.files import write_json

transformers = pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install -e '.[bench]'")

SAMPLES = 96
ZERO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
AUTO_RATES = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
SCHEDULED = {**ZERO, "optimizer": {"type": "AdamW", "params": AUTO_RATES}}
FILES = {
    "ds_zero2.json": {**ZERO, "zero_optimization": {"stage": 2}},
    "ds_warmup.json": {**SCHEDULED, "scheduler": {"type": "WarmupLR", "params": WARMUP}},
    "ds_decay.json": {
        **SCHEDULED,
        "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}},
    },
}
"""ds_configs as the Trainer's users have them; their schedule is DeepSpeed's."""
CASES: list[dict[str, Any]] = [
    {},
    {"per_device_train_batch_size": 16, "learning_rate": 2e-5, "num_train_epochs": 5, "warmup_ratio": 0.1},
    {"learning_rate": 5e-5, "num_train_epochs": 3, "warmup_steps": 500, "weight_decay": 0.01},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_train_epochs": 3, "warmup_ratio": 0.03,
     "lr_scheduler_type": "cosine", "weight_decay": 0.0},
    {"max_steps": 100, "warmup_steps": 0.07},
    {"max_steps": 50, "lr_scheduler_type": "constant", "warmup_steps": 10, "max_grad_norm": 0.3},
    {"max_steps": 50, "lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.03},
    {"max_steps": 77, "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}},
    {"max_steps": 77, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-8}},
    {"max_steps": 40, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
    {"max_steps": 40, "lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 4,
     "lr_scheduler_kwargs": {"num_decay_steps": 10}},
    {"max_steps": 30, "optim": "sgd", "learning_rate": 0.1},
    {"max_steps": 30, "optim": "adamw_torch", "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1},
    {"max_steps": 30, "optim": "adafactor", "learning_rate": 1e-3},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 2},
    {"deepspeed": "ds_zero2.json", "warmup_steps": 10, "learning_rate": 3e-5, "weight_decay": 0.01},
    {"deepspeed": "ds_warmup.json", "max_steps": 50, "warmup_steps": 10, "learning_rate": 3e-4},
    {"deepspeed": "ds_warmup.json", "max_steps": 50, "warmup_ratio": 0.1, "learning_rate": 3e-4},
    {"deepspeed": "ds_decay.json", "num_train_epochs": 5, "warmup_ratio": 0.1, "weight_decay": 0.1},
]  # fmt: skip
"""Arguments as users have them."""


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        drawn = torch.Generator().manual_seed(number)
        return {"inputs": torch.randn(4, generator=drawn), "labels": torch.randn(2, generator=drawn)}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.last(self.norm(self.first(inputs)))
        return outputs if labels is None else {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


def converted(folder: Path, given: dict[str, Any]) -> Config:
    for name, document in {**FILES, "training_args.json": {"output_dir": "out", **given}}.items():
        write_json(folder / name, document)
    document = convert(folder / "training_args.json").document
    document.setdefault("dsframe", {})["task"] = {"name": "tests.faults.slow_task:SlowTask"}
    return load(document)


def trainers(given: dict[str, Any]) -> tuple[Any, int]:
    """The Trainer of the arguments, and how many steps it makes; DeepSpeed's file is kept from it."""
    given = {key: value for key, value in given.items() if key != "deepspeed"}
    if "warmup_ratio" in given:
        given["warmup_steps"] = given.pop("warmup_ratio")  # as transformers 5 spells it
    arguments = transformers.TrainingArguments("out", use_cpu=True, report_to="none", **given)
    trainer = transformers.Trainer(Small(), arguments, train_dataset=Rows(), eval_dataset=Rows())
    return trainer, trainer.set_initial_training_values(arguments, trainer.get_train_dataloader())[-1]


@pytest.mark.parametrize("given", CASES, ids=str)
def test_all_rates_and_the_weight_decay_are_the_trainers(given: dict[str, Any], tmp_path: Path) -> None:
    trainer, steps = trainers(given)
    trainer.create_optimizer_and_scheduler(steps)
    config = converted(tmp_path, given)
    batch = config.batch(1)
    sampler = Sampler(SAMPLES, batch.train_batch_size, 0, drop_last=False)
    assert (config.settings.steps or sampler.total_steps(config.settings.epochs or 1)) == steps
    config = config.resolve(Facts(1, steps, sampler.epoch_steps))
    optimizer, scheduler = config.deepspeed.optimizer, config.deepspeed.scheduler
    assert optimizer is not None
    schedule = schedules.build(scheduler.type if scheduler else None, optimizer.params["lr"], scheduler.params)
    found = [schedule(step).learning_rate for step in range(steps)]
    of_file = scheduler.type.startswith("Warmup")
    expected = deepspeeds(scheduler.type, trainer, steps) if of_file else list(rates(trainer, steps))
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-18)
    assert (config.deepspeed.gradient_clipping or 0) == trainer.args.max_grad_norm
    decays = {group["weight_decay"]: len(group["params"]) for group in trainer.optimizer.param_groups}
    if trainer.args.weight_decay:
        assert decays == {trainer.args.weight_decay: 2, 0.0: len(groups.without_decay(Small()))}
        assert (optimizer.params["weight_decay"], config.settings.no_decay) == (
            trainer.args.weight_decay,
            "norms-and-biases",
        )
    else:
        assert not optimizer.params["weight_decay"]


def rates(trainer: Any, steps: int) -> Any:
    for _ in range(steps):
        yield trainer.optimizer.param_groups[0]["lr"]
        trainer.optimizer.step()
        trainer.lr_scheduler.step()


def deepspeeds(kind: str, trainer: Any, steps: int) -> list[float]:
    """The rates of DeepSpeed's own class, with the arguments that the Trainer fills in."""
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=trainer.args.learning_rate)
    given = {"warmup_max_lr": trainer.args.learning_rate, "warmup_num_steps": trainer.args.get_warmup_steps(steps)}
    given |= {"total_num_steps": steps} if kind == "WarmupDecayLR" else {}
    scheduler = getattr(lr_schedules, kind)(optimizer, **given)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return found

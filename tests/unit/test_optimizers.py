"""One optimizer everywhere: what the file's section means, in torch and for DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsframe import optimizers
from dsframe.config import load
from dsframe.errors import ConfigError, EngineError


def read(kind: str, params: dict[str, Any]) -> optimizers.OptimizerSpec:
    return optimizers.read(load({"train_batch_size": 8, "optimizer": {"type": kind, "params": params}}))


@pytest.mark.parametrize("kind", ["Adam", "adam", "AdamW"])
def test_adam_is_decoupled_and_without_decay_where_the_file_is_silent(kind: str) -> None:
    spec = read(kind, {"lr": 0.1})
    assert spec.cls is torch.optim.AdamW
    assert spec.arguments == {"lr": 0.1, "weight_decay": 0.0, "fused": True}
    assert spec.learning_rate == 0.1


def test_coupled_decay_on_request() -> None:
    assert read("Adam", {"adam_w_mode": False}).cls is torch.optim.Adam
    assert read("AdamW", {"adam_w_mode": False}).cls is torch.optim.AdamW  # as DeepSpeed has it


def test_torchs_default_decay_where_the_file_asks_for_torchs_adam() -> None:
    assert "weight_decay" not in read("AdamW", {"torch_adam": True}).arguments


def test_deepspeeds_own_op_on_request() -> None:
    spec = read("AdamW", {"torch_adam": False, "lr": 0.1})
    assert spec.cls is None
    assert spec.for_deepspeed() == {"type": "AdamW", "params": {"torch_adam": False, "lr": 0.1}}
    with pytest.raises(EngineError, match="DeepSpeed's own"):
        spec.build([])


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("AdamW", {"lr": 0.1, "betas": [0.9, 0.95]}),
        ("Adam", {"adam_w_mode": False}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_deepspeed_builds_the_same_optimizer(kind: str, params: dict[str, Any]) -> None:
    """By DeepSpeed's own code, from the section handed over."""
    from types import SimpleNamespace

    from deepspeed.runtime.engine import DeepSpeedEngine

    spec = read(kind, params)
    section = spec.for_deepspeed()
    name = section["type"].lower() if section["type"] == "Adam" else section["type"]
    engine = SimpleNamespace(
        optimizer_params=lambda: section["params"], optimizer_name=lambda: name, has_moe_layers=False
    )
    engine.get_optimizer_configuration = lambda *a, **k: DeepSpeedEngine.get_optimizer_configuration(engine, *a, **k)
    theirs = DeepSpeedEngine._configure_basic_optimizer(engine, [torch.nn.Parameter(torch.zeros(2))])
    ours = spec.build([torch.nn.Parameter(torch.zeros(2))])
    assert type(theirs) is type(ours)
    assert theirs.defaults == ours.defaults


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("AdamW", {"bias_correction": False}, "optimizer.params.bias_correction"),
        ("SGD", {"lr": -1.0}, "optimizer.params"),
    ],
)
def test_mistakes(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(kind, params).build([torch.nn.Parameter(torch.zeros(2))])


def test_a_file_without_an_optimizer_is_told_what_to_add() -> None:
    with pytest.raises(ConfigError, match='optimizer: missing; add "optimizer"'):
        optimizers.read(load({"train_batch_size": 8}))

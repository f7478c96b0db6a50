"""Which modules FSDP gathers as one, where a block is large beside a rank's shard."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dsframe.config.schema.settings_engines import Fsdp
from dsframe.engines import fsdp_units
from dsframe.model.build import BuiltModel
from dsframe.tasks import Task


class Block(nn.Module):
    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.use = use

    def forward(self, stream: Tensor) -> Tensor:
        return stream + self.use(self, torch.tanh(self.wide(self.norm(stream))))


class Blocks(nn.Module):
    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor], *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(Block(use) for _ in range(2))
        self.head = nn.Linear(64, 1000, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.table(tokens)
        for block in self.blocks:
            stream = block(stream)
        return cast(Tensor, self.head(stream))


class Tokens(Task):
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def model(self) -> nn.Module:
        return self._model

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum()

    def example(self) -> Any:
        return torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64)


def called(block: Any, stream: Tensor) -> Tensor:
    return cast(Tensor, block.narrow(stream))


def used(block: Any, stream: Tensor) -> Tensor:
    return nn.functional.linear(stream, block.narrow.weight, block.narrow.bias)


def asked(block: Any, stream: Tensor) -> Tensor:
    return called(block, stream.to(block.narrow.weight.dtype))


def by_numbers(block: Any, stream: Tensor) -> Tensor:
    return called(block, stream) if stream.sum() > 0 else stream[..., :64]


def units(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[str]:
    """Their names, innermost first, as if the model were a large one."""
    monkeypatch.setattr(Fsdp, "splits", lambda *_, **__: True)
    monkeypatch.setattr(fsdp_units, "all_gather_text", lambda engine, text: [text, text])
    file = SimpleNamespace(settings=SimpleNamespace(fsdp=Fsdp(**settings)))
    plan = SimpleNamespace(config=file, task=Tokens(model), device=torch.device("cpu"))
    engine: Any = SimpleNamespace(plan=plan, built=BuiltModel())
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in fsdp_units.default_units(engine, model, 2)]


def test_modules_that_are_used_by_themselves_are_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the block keeps what its own code touches, and the whole model what two modules share."""
    linears = [f"blocks.{block}.{name}" for block in (1, 0) for name in ("narrow", "wide")]
    assert units(Blocks(called), monkeypatch) == ["head", *linears, "table"]
    assert units(Blocks(called, tied=True), monkeypatch) == linears
    for use in (used, asked):
        expected = ["head", "blocks.1.wide", "blocks.1", "blocks.0.wide", "blocks.0", "table"]
        assert units(Blocks(use), monkeypatch) == expected, use


def test_blocks_stay_whole_where_a_pass_without_numbers_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ["blocks.1", "blocks.0"]
    assert units(Blocks(by_numbers), monkeypatch) == whole
    changed = Blocks(called)
    changed.blocks[0].forward = changed.blocks[0].forward  # as activation checkpointing does: of another object
    assert units(changed, monkeypatch) == whole


def test_looking_leaves_the_model_as_it_was() -> None:
    model = Blocks(called)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    assert "head" in fsdp_units.called_alone(model, Tokens(model), torch.float32)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())


def test_small_models_and_small_blocks_keep_their_blocks() -> None:
    splits, large = Fsdp().splits, 1 << 27
    assert splits(large // 8, large, 2, on_cpu=True)
    assert not splits(large // 32, large, 2, on_cpu=True)
    assert splits(large // 32, large, 8, on_cpu=True)
    assert not splits(large // 8, large, 2, on_cpu=False)
    assert not splits(1 << 23, 1 << 24, 2, on_cpu=True)
    assert not Fsdp(wrap=["Block"]).splits(large // 8, large, 2, on_cpu=True)

"""L-BFGS: the steps of torch's own, over accumulation, and on from a checkpoint to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsframe
from dsframe.data import TensorSource
from dsframe.model.lbfgs import ByParameter

ROWS = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))


class Curve(dsframe.Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self) -> Any:
        return TensorSource(ROWS, ROWS.sin().sum(1, keepdim=True))


def losses(run_dir: Path, steps: int, resume: str = "never", micro: int = 16, **file: Any) -> list[float]:
    settings = {"engine": "single", "steps": steps, "log_every_steps": 1, "run_dir": str(run_dir)}
    params = {"lr": 0.7, "max_iter": 3, "history_size": 4, "line_search_fn": "strong_wolfe"}
    content = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 0,
        "optimizer": {"type": "LBFGS", "params": params},
        "dsframe": settings,
        **file,
    }
    dsframe.fit(Curve(), content, resume=resume)
    lines = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    """With the history, and whole: saved after more steps than the history is long."""
    whole = losses(tmp_path / "whole", 12)
    losses(tmp_path / "parts", 7)
    assert losses(tmp_path / "parts", 12, resume="auto") == whole
    assert whole[-1] < whole[0] / 10


def test_accumulation_is_the_same_step(tmp_path: Path) -> None:
    whole, parts = losses(tmp_path / "whole", 5), losses(tmp_path / "parts", 5, micro=4)
    assert parts == pytest.approx(whole, rel=1e-4)


def test_masters_are_what_it_moves(tmp_path: Path) -> None:
    found = losses(tmp_path, 8, bf16={"enabled": True})
    assert found[-1] < found[0] / 2


def test_state_before_the_first_step_is_empty() -> None:
    optimizer = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    view = ByParameter(optimizer)
    view.put_back()
    assert not view.state
    assert not optimizer.state[optimizer.param_groups[0]["params"][0]]


def test_a_history_is_put_back_in_its_order() -> None:
    """Checkpoints have its parts in the order of names: 10 before 2."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.LBFGS([weight])
    steps = [torch.tensor([float(number)]) for number in range(12)]
    optimizer.state[weight] |= {
        "d": steps[0],
        "old_dirs": list(steps),
        "old_stps": list(steps),
        "ro": list(map(float, steps)),
    }
    held = ByParameter(optimizer)
    held.state[weight] = dict(sorted(held.state[weight].items()))
    held.put_back()
    for key in ("old_dirs", "old_stps", "ro"):
        assert [float(number) for number in optimizer.state[weight][key]] == list(range(12))

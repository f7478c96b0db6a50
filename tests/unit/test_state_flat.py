"""The moments that a restart gives a fresh optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsframe.engines.deepspeed.state_flat import Piece, fill
from dsframe.model.state import EngineState, ParameterState
from tests.engines.snapshot import Snapshot


@pytest.mark.parametrize(
    ("keys", "dtype"), [({"fp32_optimizer_states": True}, torch.float32), ({}, torch.bfloat16)], ids=["fp32", "masters"]
)
def test_moments_have_the_width_that_the_optimizer_gives_them(keys: dict[str, bool], dtype: torch.dtype) -> None:
    flat, moment = torch.zeros(4, dtype=torch.bfloat16), torch.rand(4)
    optimizer: Any = SimpleNamespace(state={flat: {}}, param_groups=[{}], **keys)
    one = ParameterState("w", torch.rand(4), {"exp_avg": moment}, {"step": 3.0})
    saved = Snapshot(EngineState(3, None, {}, {}, iter([one])))
    fill(optimizer, flat, [Piece("w", 0, 4, 0)], saved)
    held = optimizer.state[flat]["exp_avg"]
    assert held.dtype == dtype
    assert torch.equal(held, moment.to(dtype))

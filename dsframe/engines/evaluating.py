"""Decides whether shards that are gathered for an evaluation stay until its end."""

from __future__ import annotations

import torch

from dsframe.engine import Engine
from dsframe.host.memory import available_bytes

SHARE = 0.25
"""Weights that stay gathered take at most this share of the memory that is left."""


def stays_gathered(engine: Engine, batches: int, size: int) -> bool:
    """**Collective** where there are several ``batches``. True if every rank has memory to keep ``size`` bytes of weights from
    one batch to the next, so that they are gathered once and not once a batch."""
    if batches < 2:
        return False
    plan = engine.plan
    lacks = size > SHARE * available_bytes(plan.device, plan.world.local_size)
    return not engine.sum_over_ranks(torch.tensor([float(lacks)], device=plan.device)).item()

"""Decides whether shards that are gathered for an evaluation stay until its end."""

from __future__ import annotations

from dsframe.cluster.exchange import any_rank
from dsframe.engine import Engine
from dsframe.host.memory import available_bytes

SHARE = 0.25
"""Weights that stay gathered take at most this share of the memory that is left."""


def stays_gathered(engine: Engine, size: int) -> bool:
    """**Collective.** True if every rank has memory to keep ``size`` bytes of weights for an evaluation: they are gathered once
    and not once a batch, and metrics may call the model as often as they like."""
    plan = engine.plan
    lacks = size > SHARE * available_bytes(plan.device, plan.world.local_size)
    return not any_rank(engine, lacks)

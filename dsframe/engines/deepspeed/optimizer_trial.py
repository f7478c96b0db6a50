"""Tests whether a user's optimizer can work on flat shards, which ZeRO gives it."""

from __future__ import annotations

from typing import Any

import torch

from dsframe.errors import EngineError
from dsframe.model.optimizers import OptimizerSpec


def refuse_dependent(spec: OptimizerSpec, stage: int) -> None:
    """Raises EngineError if a user's optimizer updates a rank's flat shard differently than whole parameters.

    At ZeRO-1 and 2 it is created with whole parameters and then gets shards; at ZeRO-3 it never sees their shapes.
    """
    draw = torch.Generator().manual_seed(0)
    shapes = ((4, 6), (6,), (5, 2))
    whole = [torch.nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64)) for shape in shapes]
    seen = [torch.nn.Parameter((w.flatten() if stage == 3 else w).detach().clone()) for w in whole]
    number = {id(parameter): index for index, parameter in enumerate(seen)}
    try:
        with torch.random.fork_rng(devices=[]):
            both = spec.build(list(whole)), spec.build(list(seen))
            members = [[number[id(parameter)] for parameter in group["params"]] for group in both[1].param_groups]
            before = [_half([whole[n] for n in group]) for group in members]
            shards = [torch.nn.Parameter(start.clone()) for start in before]
            for options, shard in zip(both[1].param_groups, shards, strict=True):
                options["params"] = [shard]
            for _ in range(3):
                for weight in whole:
                    weight.grad = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
                for shard, group in zip(shards, members, strict=True):
                    shard.grad = _half([whole[n].grad for n in group])
                for optimizer in both:
                    optimizer.step()
    except Exception:  # for example an optimizer that needs the model's own parameters
        return
    for shard, group, start in zip(shards, members, before, strict=True):
        moved, expected = shard.detach() - start, _half([whole[n] for n in group]) - start
        if (moved - expected).norm() > 1e-3 * expected.norm():
            raise EngineError(
                f"{spec.name}: its update of a number depends on others, or on a tensor's shape, and DeepSpeed "
                f'ZeRO-{stage} gives it flat shards; set "stage" to 0, or choose engine "ddp" or "horovod"'
            )


def _half(tensors: list[Any]) -> torch.Tensor:
    """Returns the part of the first of two ranks."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors] or [torch.empty(0, dtype=torch.float64)])
    return flat.tensor_split(2)[0].clone()

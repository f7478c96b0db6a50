"""An exponential moving average of the weights (Polyak averaging), in each engine's own shards.

The average of a parameter is one more tensor of the optimizer's state about it: so engines shard it, checkpoints have it by the
parameter's name, and it is the same on any engine. Arithmetic as in torch 2.13, ``optim/swa_utils.py`` (get_ema_multi_avg_fn).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

KEY = "ema"
"""Name of the average among the optimizer's tensors, and in checkpoints."""


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer,
    masters: Sequence[Tensor],
    decay: float,
    start: Mapping[Tensor, Tensor] | None = None,
) -> None:
    """Average = decay x average + (1 - decay) x weight, of what this rank holds. The first time the average is the weight, or
    begins at what ``start`` has for it.

    ``masters``: the tensors that ``optimizer`` updates. To be called after an update: an optimizer that finds any state
    about a tensor makes none of its own.
    """
    later = []
    for master in masters:
        held = optimizer.state[master]
        if KEY in held:
            later.append(master)
        else:
            local = _local(master.detach())
            held[KEY] = master.detach().clone()
            if start is not None:
                _local(held[KEY]).copy_(start[master].lerp(local, 1.0 - decay))
    if later:
        averages = [_local(optimizer.state[master][KEY]) for master in later]
        torch._foreach_lerp_(averages, [_local(master.detach()) for master in later], 1.0 - decay)


@torch.no_grad()
def copies(masters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Returns what this rank holds of each master now."""
    return {master: _local(master.detach()).clone() for master in masters}


@contextmanager
def swapped(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], publish: Callable[[], None]) -> Iterator[None]:
    """**Collective** where ``publish`` is. Weights and averages have changed places inside.

    ``publish``: makes the model have what the masters have.
    """
    _swap(optimizer, masters, publish)
    try:
        yield
    finally:
        _swap(optimizer, masters, publish)


@torch.no_grad()
def _swap(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], publish: Callable[[], None]) -> None:
    for master in masters:
        if KEY in optimizer.state.get(master, {}):
            weight, average = _local(master.detach()), _local(optimizer.state[master][KEY])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
    publish()


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's, whose class takes half a second to import
    return local

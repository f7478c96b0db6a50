"""An exponential moving average of the weights (Polyak averaging), in each engine's own shards. The average of a
parameter is another tensor in its optimizer state, so engines shard it, checkpoints save it by the parameter's name,
and it is the same with any engine. Formula as in torch 2.13, ``optim/swa_utils.py`` (get_ema_multi_avg_fn)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

KEY = "ema"
"""Name of the average in the optimizer state and in checkpoints."""


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer,
    masters: Sequence[Tensor],
    decay: float,
    start: Mapping[Tensor, Tensor] | None = None,
) -> None:
    """Updates this rank's part: average = decay x average + (1 - decay) x weight. At the first call the average is the
    weight, or starts from its tensor in ``start``. ``masters``: the tensors that ``optimizer`` updates. Call it after
    an update: an optimizer does not initialize the state of a tensor that already has some."""
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
    """Returns copies of this rank's part of each master."""
    return {master: _local(master.detach()).clone() for master in masters}


@contextmanager
def swapped(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], publish: Callable[[], None]) -> Iterator[None]:
    """**Collective** if ``publish`` is. Swaps weights and averages inside the context. ``publish``: copies the masters
    to the model."""
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
    local: Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, whose class takes half a second to import
    return local

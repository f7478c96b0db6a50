"""An optimizer's update without the Python that torch runs for each parameter in each step.

torch's fused Adam is one call for all parameters, but its ``step`` first looks every parameter's state up again: a hash, a
dictionary and six appends each, more than a millisecond a step at 1,000 parameters. The lists do not change between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PLAIN = ("amsgrad", "capturable", "differentiable")


@dataclass(frozen=True)
class _Lists:
    """What the update of one parameter group works on."""

    group: dict[str, Any]
    parameters: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


class Update:
    """``optimizer.step()``, from remembered lists where it is torch's fused Adam. The same calls on the same tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer, local: Callable[[list[Tensor]], list[Tensor]] = list) -> None:
        """``local``: this rank's own part of tensors that know of other ranks' parts."""
        self._optimizer, self._local = optimizer, local
        self._lists: list[_Lists] | None = None
        # Not what inherits from them: Horovod's Adasum sends inside of its step.
        self._able = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
            group["fused"] and not any(group[key] for key in _PLAIN) for group in optimizer.param_groups
        )
        self._key: Any = None
        self._first: Any = None

    def forget(self) -> None:
        """The optimizer's state was replaced."""
        self._lists = None

    @torch.no_grad()
    def __call__(self, step: Callable[[], Any]) -> None:
        """One update from the parameters' gradients, of which none is missing. ``step``: torch's own way."""
        state = self._optimizer.state
        if self._lists is None or state.get(self._key) is not self._first:  # cleared: all of it starts again
            step()
            self._lists = self._remember() if self._able else None
            return
        for lists in self._lists:
            group = lists.group
            gradients = self._local([parameter.grad for parameter in group["params"]])
            torch._foreach_add_(lists.steps, 1)
            beta1, beta2 = group["betas"]
            # The key came with torch 2.7, where AdamW is an Adam with it.
            decoupled = group.get("decoupled_weight_decay", type(self._optimizer) is torch.optim.AdamW)
            (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
                lists.parameters,
                gradients,
                lists.averages,
                lists.squares,
                [],
                lists.steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )

    def _remember(self) -> list[_Lists] | None:
        found, state = [], self._optimizer.state
        for group in self._optimizer.param_groups:
            parameters = group["params"]
            if len({(one.device, one.dtype) for one in parameters}) != 1:
                return None  # one call takes one kind
            held = [state[one] for one in parameters]
            averages, squares = (self._local([one[key] for one in held]) for key in ("exp_avg", "exp_avg_sq"))
            found.append(_Lists(group, self._local(parameters), averages, squares, [one["step"] for one in held]))
        self._key = self._optimizer.param_groups[0]["params"][0]
        self._first = state[self._key]
        return found

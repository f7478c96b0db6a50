"""Finds parameters that the optimizer changes although the loss does not use them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.cluster.exchange import Ranks, all_gather_json


class Unused:
    """Compares which gradients arrive in steps 1, 2, 4, 8, ..., by hooks that exist in these steps only."""

    def __init__(self, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, *, hooks: bool = True) -> None:
        """``hooks``: False if the engine sets ``missing`` in each step."""
        self._ranks, self._optimizer = ranks, optimizer
        self.missing: Collection[str] = ()
        """Parameters without a gradient on all ranks in this step."""
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._asks = hooks and not ranks.plan.config.settings.model.compile  # a compiled model would be compiled again
        shards = any(not _is_whole(weight) for weight in self._trained.values())
        self._modules = [*model.named_modules()] if shards else []
        """A sharded weight is replaced when its module, or one around it, is called."""
        self._steps, self._hooks = 0, list[Any]()
        self._hooked, self._arrived = set[str](), set[str]()
        self._used, self._skipped = set[str](), set[str]()

    def begin(self) -> None:
        """Called before a step."""
        self._steps += 1
        if self._asks and self._steps & (self._steps - 1) == 0:
            self._arrived.clear()
            self._hooked.clear()
            self._hook(self._trained.items())
            for name, module in self._modules:
                self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))

    def _enter(self, prefix: str, unit: nn.Module, _: Any) -> None:
        self._hook(unit.named_parameters(prefix))

    def _hook(self, named: Iterable[tuple[str, Any]]) -> None:
        for name, weight in named:
            if name in self._trained and name not in self._hooked and _is_whole(weight):
                self._hooked.add(name)
                self._hooks.append(weight.register_hook(partial(self._come, name)))

    def _come(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._arrived.add(name)

    def end(self) -> list[str]:
        """**Collective.** Returns unused parameters that the update changes: weight decay does, and momentum if another
        step used them."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self.missing = self._missing_on_all()
        elif self._asks or (not self.missing and len(self._used) == len(self._trained)):
            return []  # the usual step
        self._skipped.update(self.missing)
        self._used.update(self._trained.keys() - self.missing)
        groups = self._optimizer.param_groups
        if any(group.get("weight_decay") for group in groups):
            return sorted(self.missing)
        is_plain = self._ranks.plan.optimizer.name.lower() == "sgd"
        is_plain = is_plain and not any(group.get("momentum") for group in groups)
        return [] if is_plain else sorted(self._skipped & self._used)

    def _missing_on_all(self) -> set[str]:
        """**Collective.** Ranks may have different parameters."""
        local = sorted(self._trained.keys() - self._arrived)
        missing = {name for names in all_gather_json(self._ranks, local) for name in names}
        if not missing:
            return missing
        arrived = all_gather_json(self._ranks, sorted(missing & self._arrived))
        return missing - {name for names in arrived for name in names}


def _is_whole(weight: Any) -> bool:
    return type(weight.data) is Tensor

"""Finds parameters that the optimizer changes although the loss does not use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dsframe.cluster.exchange import Ranks, all_gather_json


class Unused:
    """Compares which gradients arrive in steps 1, 2, 4, 8, ..., by hooks that exist in these steps only."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, optimizer: Optimizer, hooks: bool = True, units: Any = ()
    ) -> None:
        """``hooks``: False if the engine sets ``missing`` in each step. ``units``: classes of modules whose weights the
        library replaces when they are called."""
        self._ranks, self._optimizer = ranks, optimizer
        self.missing: Collection[str] = ()
        """Parameters without a gradient on all ranks in this step."""
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._units = [(name, unit) for name, unit in model.named_modules() if isinstance(unit, units)]
        compiled = ranks.plan.config.settings.model.compile is True
        self._asks = hooks and not (compiled and self._units)  # hooks on units inside would compile it again
        self._steps, self._hooks = 0, list[Any]()
        self._hooked, self._arrived = set[str](), set[str]()
        self._looks, self._skips = 0, Counter[str]()
        """Number of steps that were looked at; for each parameter, on any stage, in how many no loss used it."""

    def begin(self) -> None:
        """Called before a step."""
        self._steps += 1
        if self._asks and self._steps & (self._steps - 1) == 0:
            self._arrived.clear()
            self._hooked.clear()
            self._hook(self._trained.items())
            for name, unit in self._units:
                self._hooks.append(unit.register_forward_pre_hook(partial(self._enter, name)))

    def _enter(self, prefix: str, unit: nn.Module, _: Any) -> None:
        self._hook(unit.named_parameters(prefix))

    def _hook(self, named: Iterable[tuple[str, Any]]) -> None:
        for name, weight in named:
            wanted = name in self._trained and name not in self._hooked
            if wanted and weight.requires_grad and type(weight.data) is Tensor:  # a model may freeze it for one call
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
        elif self._asks:
            return []
        self._looks += 1
        self._skips.update(self.missing)
        if not self._skips:
            return []  # the usual step
        groups = self._optimizer.param_groups
        if any(group.get("weight_decay") for group in groups):
            return sorted(self.missing)
        is_plain = self._ranks.plan.optimizer.name.lower() == "sgd"
        is_plain = is_plain and not any(group.get("momentum") for group in groups)
        return [] if is_plain else sorted(name for name, times in self._skips.items() if times < self._looks)

    def _missing_on_all(self) -> set[str]:
        """**Collective.** Ranks may have different parameters."""
        local = sorted(self._trained.keys() - self._arrived)
        missing = {name for names in all_gather_json(self._ranks, local) for name in names}
        if not missing:
            return missing
        arrived = all_gather_json(self._ranks, sorted(missing & self._arrived))
        return missing - {name for names in arrived for name in names}

"""What an optimizer of a user's keeps outside of its state: counts in its groups, or in attributes. No checkpoint has it."""

from __future__ import annotations

from typing import Any

import torch

from dsframe.model.optimizers import OptimizerSpec
from dsframe.values import copied, same


def build(spec: OptimizerSpec, parameters: list[Any]) -> torch.optim.Optimizer:
    """The optimizer. Of a user's own the first step is watched. Raises as ``spec.build`` does."""
    optimizer = spec.build(parameters)
    if spec.is_custom:
        _watch_first_step(optimizer, spec.kept_outside)
    return optimizer


def _watch_first_step(optimizer: torch.optim.Optimizer, kept_outside: set[str]) -> None:
    """Adds to ``kept_outside`` the names of what the first step changes in groups and attributes."""
    before: dict[str, Any] = {}
    depth = 0

    def begin(*_: Any) -> None:
        nonlocal depth
        depth += 1  # a step that calls its class's is two
        if depth == 1:
            before.update(_values(optimizer))

    def end(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth:
            return
        for name, value in _values(optimizer).items():
            made = name not in before and isinstance(value, (int, float, torch.Tensor))
            if made or not same(before.get(name), value):
                kept_outside.add(name)
        for hook in hooks:
            hook.remove()

    hooks = (optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end))


def _values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    of_groups = {f"param_groups[{n}][{key!r}]": value for n, group in enumerate(groups) for key, value in group.items()}
    # Of every optimizer of torch's, and what its schedulers set.
    torchs = vars(torch.optim.SGD([torch.empty(0)])).keys() | {"_opt_called", "_step_count"}
    own = {name: value for name, value in vars(optimizer).items() if name not in torchs}
    return {name: copied(value) for name, value in {**of_groups, **own}.items()}

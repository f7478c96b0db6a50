"""torchmetrics objects of a task: each sample counts once, whatever the engine and the number of ranks.

torchmetrics gathers states by torch.distributed, which not every engine has. It takes another function for it
(``dist_sync_fn``, torchmetrics 1.x, ``metric.py``), and here gets the collective that all engines have.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dsframe.cluster.exchange import Ranks, all_gather_tensor
from dsframe.errors import TaskError


def reset(engine: Ranks) -> None:
    """Empties the metric objects. Raises TaskError where one is none, or keeps what cannot be gathered."""
    for name, metric in engine.plan.task.metric_objects.items():
        whose = f"{type(engine.plan.task).__name__}.metric_objects[{name!r}]"
        if not all(callable(getattr(metric, verb, None)) for verb in ("update", "compute", "reset", "modules")):
            raise TaskError(f"{whose} is {type(metric).__name__}, not a torchmetrics object")
        metric.to(engine.plan.device)
        metric.reset()
        for part in metric.modules():
            if hasattr(part, "_reductions"):
                _connect(engine, part, whose)


def compute(engine: Ranks) -> dict[str, float]:
    """**Collective.** Returns the metric objects' numbers over all samples; those of a dict are named ``name_key``."""
    numbers: dict[str, float] = {}
    for name, metric in engine.plan.task.metric_objects.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*was called before the ``update`` method")  # a rank without samples
            value = metric.compute()
        parts = {f"{name}_{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, part in parts.items():
            if isinstance(part, Tensor) and part.numel() != 1:
                whose = f"{type(engine.plan.task).__name__}.metric_objects[{name!r}]"
                raise TaskError(f"{whose} gives shape {list(part.shape)}, not a number; choose an average")
            numbers[key] = float(part)
    return numbers


def _connect(engine: Ranks, metric: Any, whose: str) -> None:
    """Raises TaskError where a state is a list that is not joined: ranks have other numbers of entries."""
    for state, reduction in metric._reductions.items():
        if isinstance(metric._defaults[state], list) and getattr(reduction, "__name__", "") != "dim_zero_cat":
            raise TaskError(
                f"{whose} keeps {state!r} as a list for each batch, which ranks cannot join; use metrics() and finalize()"
            )

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [gathered.to(tensor.device) for gathered in all_gather_tensor(engine, tensor)]

    metric.dist_sync_fn = gather
    metric.distributed_available_fn = lambda: engine.plan.world.size > 1

"""Runs a task's torchmetrics objects so that each sample counts once, with any engine and number of ranks. torchmetrics
gathers states by torch.distributed, which not every engine has. It accepts another function (``dist_sync_fn``,
torchmetrics 1.x, ``metric.py``): here the collective that all engines have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dsframe.cluster.exchange import Ranks, all_gather_tensor
from dsframe.errors import DsframeError, TaskError
from dsframe.text import reason
from dsframe.values import copied, same


class FailedMetricError(TaskError):
    """A metric that raises; with more or other samples it may not."""


def reset(engine: Ranks) -> None:
    """Resets the metric objects. Raises TaskError for other types, and states that cannot be gathered."""
    for name, metric in engine.plan.task.metric_objects.items():
        whose = f"{type(engine.plan.task).__name__}.metric_objects[{name!r}]"
        if not all(callable(getattr(metric, verb, None)) for verb in ("update", "compute", "reset", "modules")):
            raise TaskError(f"{whose} is {type(metric).__name__}, not a torchmetrics object")
        metric.to(engine.plan.device)
        try:
            metric.reset()
        except Exception as error:
            raise TaskError(
                f"{whose} cannot be reset: {reason(error, 400)}; give a metric of one evaluation"
            ) from error
        for part in metric.modules():
            if is_metric(part):
                _gather_states(engine, part, whose)


def is_metric(module: Any) -> bool:
    """Returns True for a metric of torchmetrics, which need not be installed."""
    return hasattr(module, "_reductions")


def compute(engine: Ranks) -> dict[str, float]:
    """**Collective.** Returns the metrics over all samples; those in a dict are named ``name_key``. Raises
    FailedMetricError if one raises (except RuntimeError, which passes through), TaskError if a result is not a
    number."""
    numbers: dict[str, float] = {}
    for name, metric in engine.plan.task.metric_objects.items():
        whose = f"{type(engine.plan.task).__name__}.metric_objects[{name!r}]"
        _refuse_unknown_states(metric, whose)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*was called before the ``update`` method")  # a rank without samples
                value = metric.compute()
        except (DsframeError, RuntimeError):  # a lost peer, perhaps
            raise
        except Exception as error:
            raise FailedMetricError(f"{whose} cannot be computed: {reason(error, 400)}") from error
        parts = {f"{name}_{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, part in parts.items():
            if isinstance(part, Tensor) and part.numel() != 1:
                raise TaskError(f"{whose} gives shape {list(part.shape)}, not a number; choose an average")
            try:
                numbers[key] = float(part)
            except (TypeError, ValueError):
                raise TaskError(f"{whose} gives a {type(part).__name__}, not a number; choose another") from None
    return numbers


def _gather_states(engine: Ranks, metric: Any, whose: str) -> None:
    """Makes a metric gather its states. Raises TaskError for lists that are not concatenated."""
    for state, reduction in metric._reductions.items():
        if isinstance(metric._defaults[state], list) and getattr(reduction, "__name__", "") != "dim_zero_cat":
            raise TaskError(
                f"{whose} keeps {state!r} as a list for each batch, which ranks cannot join; compute it in metrics_of_all()"
            )

    # Tensors that are not states, such as MinMaxMetric's bounds, are not reset; the object keeps the initial ones.
    loose = {name for name, value in vars(metric).items() if isinstance(value, Tensor) and not name.startswith("_")}
    first = {name: vars(metric)[name] for name in loose - metric._defaults.keys()}
    vars(metric).update(vars(metric).setdefault("_dsframe_first", first))

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [gathered.to(tensor.device) for gathered in all_gather_tensor(engine, tensor)]

    metric.sync_on_compute = metric._to_sync = True  # else each rank has the value of its own samples
    metric.dist_sync_fn = gather
    metric.distributed_available_fn = lambda: engine.plan.world.size > 1
    vars(metric)["_dsframe_reset"] = {name: copied(value) for name, value in _other_attributes(metric)}


def _other_attributes(metric: Any) -> list[tuple[str, Any]]:
    """Returns attributes that torchmetrics neither gathers nor resets, but private bools set by a batch."""
    import torchmetrics

    known = {name for name in vars(torchmetrics.SumMetric()) if name.startswith("_")} | metric._defaults.keys()
    return [
        (name, value)
        for name, value in vars(metric).items()
        if name not in known and not name.startswith("_dsframe")
        if not (name.startswith("_") and isinstance(value, bool))
    ]


def _refuse_unknown_states(metric: Any, whose: str) -> None:
    """Raises TaskError if updates have changed attributes that are not states, because each rank has its own."""
    for part in metric.modules():
        before = getattr(part, "_dsframe_reset", {})
        for name, value in _other_attributes(part) if before else ():
            if before.get(name) is not None and not same(before[name], value):  # None before: a setting
                raise TaskError(
                    f"{whose} keeps {name!r}, which ranks cannot gather; make it a state: self.add_state({name!r}, ...)"
                )

"""Model FLOPs utilization: the operations that the model needs, as a share of what the machine can do
(Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Needed are those of one forward and one backward
pass; what is recomputed is not counted.

What the machine can do is measured, not read off a data sheet: products of two large matrices, on all
ranks at the same time, with the threads and in the number format of the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dsframe.engine import Engine
from dsframe.engines import precision
from dsframe.model.forward import call
from dsframe.observe.flops import OperationCounter
from dsframe.observe.meta import Attention, Loss, model_of
from dsframe.observe.observer import Observer, ObserverContext
from dsframe.tasks.meta import example, map_floats, meta_device, with_rows
from dsframe.tasks.task import Task
from dsframe.text import amount

if TYPE_CHECKING:
    from dsframe.config import Config

_BUDGET_SECONDS = 0.15
_LONG_ENOUGH_SECONDS = 3e-3
"""Of one product, for the largest matrices that are tried."""


@dataclass(frozen=True)
class Utilization:
    """What it takes to turn a rate into a share."""

    flops_per_unit: float
    """Of the model, for one sample or token."""
    peak_flops: float
    """A second, of all ranks together."""

    def of(self, rate: float) -> float:
        """``rate``: units a second over all ranks."""
        return rate * self.flops_per_unit / self.peak_flops


def observer(context: ObserverContext) -> Observer:
    """Measures at the start, and gives a share at every logged step."""
    return MfuObserver(context.say)


class MfuObserver(Observer):
    """``dsframe.mfu``: the utilization at logged steps and of the whole run."""

    def __init__(self, say: Callable[[str], None], measured: Utilization | None = None) -> None:
        self._say, self._measured = say, measured

    def start(self, engine: Engine) -> Mapping[str, Any]:
        """**Collective.** Measures, and says relative to what it is."""
        self._measured = utilization(engine, self._say)
        return {} if self._measured is None else vars(self._measured)

    def figures(self, rate: float) -> Mapping[str, float]:
        """Since the last logged step; nothing without a rate."""
        return {"mfu": self._measured.of(rate)} if self._measured and rate else {}

    def results(self, rate: float) -> Mapping[str, Any]:
        return self.figures(rate)


def utilization(engine: Engine, say: Callable[[str], None]) -> Utilization | None:
    """**Collective.** Model and machine, measured; None where the model cannot be counted."""
    plan = engine.plan
    dtype = precision.autocast_dtype(plan.config, plan.device) or precision.parameter_dtype(plan.config)
    of_sample, problem = 0.0, "the model does no products of matrices"
    if plan.world.is_main:
        try:
            of_sample = flops_per_sample(plan.task, plan.config)
        except Exception as error:  # no reason not to train
            problem = " ".join(str(error).split())

    def over_ranks(value: float) -> float:
        return float(engine.sum_over_ranks(torch.tensor([value], dtype=torch.float64, device=plan.device)))

    of_sample = over_ranks(of_sample)  # behind a collective, so that all ranks measure at once
    peak = over_ranks(peak_flops(dtype, plan.device))
    if not of_sample:
        say(f"dsframe: no MFU: {problem}")
        return None
    name = str(dtype).removeprefix("torch.")
    say(
        f"dsframe: MFU is relative to {amount(peak)}FLOP/s, measured now: products of {name} matrices on "
        f"{plan.world.size} rank(s) at once; the model needs {amount(of_sample)}FLOP a sample"
    )
    return Utilization(of_sample / plan.task.units_per_sample, peak)


def flops_per_sample(task: Task, config: Config) -> float:
    """Of one forward and one backward pass, counted on the meta device. Raises TaskError where the
    model needs numbers there."""
    rows = 2  # BatchNorm refuses a single value
    inputs, targets = example(task)
    with meta_device(), Attention(), OperationCounter() as count:
        given = map_floats(with_rows(inputs, rows), lambda tensor: tensor.float().requires_grad_())
        outputs = call(model_of(task, torch.float32, config), given)
        loss = Loss(task, with_rows(targets, rows))(outputs)
        torch.autograd.backward([leaf for leaf in tree_leaves(loss) if isinstance(leaf, Tensor)])
    return float(count.forward + count.backward) / rows


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP a second of this rank, the best of some products of matrices; takes about 0.2 s.

    Matrices grow until a product takes a few milliseconds: where a format has no instructions of its
    own (fp16 on most CPUs) a large product would take seconds.
    """
    size, largest, best = 256, 8192 if device.type == "cuda" else 1024, 0.0
    limit = time.perf_counter() + _BUDGET_SECONDS
    while time.perf_counter() < limit or not best:
        matrix = torch.full((size, size), 0.5, dtype=dtype, device=device)
        _product_seconds(matrix)  # starts libraries
        seconds = _product_seconds(matrix)
        best = max(best, 2.0 * size**3 / seconds)
        if seconds < _LONG_ENOUGH_SECONDS and size < largest:
            size *= 2
    return best


def _product_seconds(matrix: Tensor) -> float:
    began = time.perf_counter()
    product = torch.mm(matrix, matrix)
    if product.device.type == "cuda":
        torch.cuda.synchronize(product.device)
    return time.perf_counter() - began

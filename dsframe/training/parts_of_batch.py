"""Whether a task's metrics are sums over rows: others depend on the size of the batches of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from dsframe.engine import Engine
from dsframe.errors import EngineError
from dsframe.tasks.task import Sum, Sums, gives
from dsframe.training import loss_kind, unmoved
from dsframe.values import tensors_of

_TOLERANCE = 1e-3
"""Relative: the outputs are the same, and maybe in 16 bits."""


def dependent(engine: Engine, measure: Callable[[Any, Any], Sums], outputs: Any, targets: Any) -> list[str]:
    """Returns the names of metrics whose mean over the rows of a batch is another one than that over two unequal parts of it, by
    their sums; where the task takes totals for itself, whose total is another one, too. Nothing where the tensors do not have rows
    alike, or a metric takes no other number of rows. Leaves no trace, but where a metric draws."""
    context = engine.plan.task.context
    samples = context.eval_samples
    if samples < 2 or {len(leaf) for leaf in tensors_of((outputs, targets)) if leaf.ndim} != {samples}:
        return []
    rows = loss_kind.rows_of(outputs, targets)
    if not rows:
        return []
    first, seen = max(1, rows // 4), list[Sums]()
    try:
        for part in (slice(0, rows), slice(0, first), slice(first, rows)):
            context.eval_samples = part.stop - part.start
            with unmoved.task_unmoved(engine):
                seen.append(measure(*tree_map_only(Tensor, partial(loss_kind.rows_in, part), (outputs, targets))))
    except EngineError:
        raise
    except Exception:
        return []
    finally:
        context.eval_samples = samples
    whole, *parts = seen
    takes_totals = gives(engine.plan.task, "finalize")
    names = []
    for name, of_all in whole.items():
        of_parts = sum((sums[name] for sums in parts if name in sums), Sum(0.0 * of_all.total, 0))
        is_total = takes_totals and _near(float(of_all.total), float(of_parts.total))
        if not is_total and not _near(of_all.mean, of_parts.mean):
            names.append(name)
    return names


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))

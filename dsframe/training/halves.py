"""Computes the kind of a loss, a mean over rows, a sum, or neither, from the loss of all rows and of halves of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dsframe.errors import TaskError
from dsframe.tasks.task import Task, loss_and_terms
from dsframe.values import tensors_of

UNEVEN = "neither, by its gradients"
TOLERANCE = 3e-5
"""Relative. Rounding of losses of the same fp32 outputs is far smaller; different row lengths cause more."""
TOLERANCE_OF_16_BITS = 1e-2
_CUTS, _DATA = {"detach", "detach_", "item", "tolist", "__float__", "_set_grad_enabled"}, Tensor.data.__get__  # type: ignore[attr-defined]
_ELEMENTS = 1 << 22
"""Maximum number of output elements tested (but four complete rows): logits may be large."""


def halvings(rows: int) -> list[Tensor]:
    """Returns which of ``rows``, an even number, are in the first half, for each way to halve them. Four rows have all
    three ways, so that the largest loss of halves is not a mean over halves in each of them."""
    numbers = torch.arange(rows)
    ways = [numbers < rows // 2, numbers % 2 == 0, numbers % 4 % 3 == 0]
    return ways[: 1 if rows == 2 else 3 if rows % 4 == 0 else 2]


def agreed(kinds: Collection[str]) -> str:
    """Returns the kind of a loss whose halvings, or ranks, have shown ``kinds``. They may differ: a mean over chosen
    rows is also a sum if all chosen rows are in one half."""
    seen = {*kinds} - {""}
    return seen.pop() if len(seen) == 1 else "neither" if seen else ""


def kind_of_parts(losses: Sequence[float], items: Sequence[float], tolerance: float = TOLERANCE) -> str:
    """Returns the kind, from the losses of a batch and of its two halves, or "" if they do not determine it. ``items``:
    the number of items that a mean would be over, for each. ``tolerance``: relative."""
    if not sum(items[1:]):
        return ""
    losses = [loss if count else 0.0 for loss, count in zip(losses, items, strict=True)]  # a mean over nothing is NaN
    near = tolerance_of(losses, tolerance) * max(map(abs, losses))
    mean = sum(loss * count for loss, count in zip(losses[1:], items[1:], strict=True)) / sum(items[1:])
    is_mean, is_sum = abs(losses[0] - mean) <= near, abs(losses[0] - sum(losses[1:])) <= near
    if near == 0 or is_mean == is_sum:
        return "neither" if near > 0 and not is_mean else ""
    return "mean" if is_mean else "sum"


def tolerance_of(losses: Sequence[float], tolerance: float) -> float:
    """Returns ``tolerance``, but that of 16 bits at least if the losses look rounded to such a format."""
    values = torch.tensor(losses, dtype=torch.float64)
    short = any(values.equal(values.to(dtype).double()) for dtype in (torch.bfloat16, torch.float16))
    return max(tolerance, TOLERANCE_OF_16_BITS) if short else tolerance


def rows_in(part: slice | Tensor, leaf: Tensor) -> Tensor:
    """Returns these rows of a tensor: a copy, because a loss may write to it."""
    return (leaf[part] if leaf.ndim else leaf).clone()


def rows_of(outputs: Any, targets: Any) -> int:
    """Returns the even number of rows to test; 0 if tensors differ in their number of rows."""
    of_outputs = tensors_of(outputs)
    tensors = of_outputs + [leaf for leaf in tensors_of(targets) if leaf.ndim]
    if not of_outputs or any(not leaf.ndim for leaf in of_outputs) or len({len(leaf) for leaf in tensors}) != 1:
        return 0
    each = max(leaf[0].numel() for leaf in tensors)
    return min(len(tensors[0]), max(4, _ELEMENTS // max(each, 1))) // 2 * 2


def kind_of(task: Task, outputs: Any, targets: Any) -> str:
    """Returns the kind of the loss, or "" if it is unknown: one row, tensors without rows, or a loss of 0. Gradients are
    on if the loss uses no weights: it may ask for them."""
    rows = rows_of(outputs, targets)
    if not rows:
        task.loss(*tree_map_only(Tensor, torch.clone, (outputs, targets)))  # may draw random numbers, or change a state
        return ""
    every, numbers, halves = slice(0, rows), torch.arange(rows), halvings(rows)
    compute = partial(computed, task, (outputs, targets), cuts=(cuts := _Cuts()))
    with torch.no_grad():
        compute(every)
    kinds, first = set(), list[tuple[Tensor, float, list[Tensor]]]()
    with torch.set_grad_enabled(not cuts.uses_weights):
        value = float((whole := compute(every))[0].detach())
        for half in halves:
            parts = [compute(numbers[half]), compute(numbers[~half])]
            losses = [value, *(float(loss.detach()) for loss, _, _ in parts)]
            kinds.add(kind_of_parts(losses, [items for _, items, _ in (whole, *parts)]))
            first = first or [whole, *parts] if cuts.detaches else []
    kind = agreed(kinds)
    try:  # on every rank, whatever its result: a backward pass may communicate
        gradients = [(torch.autograd.grad(loss, rows, materialize_grads=True), items) for loss, items, rows in first]
        uneven = bool(gradients) and not _have_gradients_of(kind, halves[0], *gradients)
    except Exception:  # a loss without gradients here
        return kind
    return UNEVEN if uneven and kind in ("mean", "sum") else kind


def computed(task: Task, batch: Any, part: slice | Tensor, cuts: Any = None) -> tuple[Tensor, float, list[Tensor]]:
    """Returns the loss of the rows ``part`` of outputs and targets, its number of items, and these rows of outputs."""
    with torch.no_grad():
        some = tree_map_only(Tensor, partial(rows_in, part), batch)
    rows = [leaf.requires_grad_() for leaf in tensors_of(some[0]) if leaf.is_floating_point()]
    with cuts or nullcontext():
        loss = task.loss(*tree_map_only(Tensor, torch.clone, some))  # not leaves: it may write to them
    return loss_and_terms(loss)[0], float(task.loss_weight(some[1])), rows


class _Cuts(TorchFunctionMode):
    """Records calls that detach values or use weights. With gradients on, raises TaskError for the latter."""

    detaches = uses_weights = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.detaches |= getattr(func, "__name__", "") in _CUTS or func == _DATA
        self.uses_weights |= any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves((args, kwargs)))
        if torch.is_grad_enabled() and self.uses_weights:
            raise TaskError("the loss uses weights")
        return func(*args, **kwargs or {})


def _have_gradients_of(kind: str, half: Tensor, *of_parts: tuple[tuple[Tensor, ...], float]) -> bool:
    """Returns False if detached factors depend on all rows: ``a + b * (a / b).detach()`` has the value of a mean."""
    whole, items = of_parts[0]
    for part, (gradients, count) in zip((half, ~half), of_parts[1:], strict=True):
        factor = count / items if kind == "mean" else 1.0
        for every, rows in zip(whole, gradients, strict=True):
            near = max(1e-3, 4 * torch.finfo(rows.dtype).eps) * float(every.abs().max())
            if count and every.isfinite().all() and not torch.allclose(every[part], rows * factor, rtol=0, atol=near):
                return False
    return True

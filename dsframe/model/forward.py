"""Calls the model, and the task's loss on its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from dsframe.errors import TaskError
from dsframe.model import output_classes
from dsframe.model.micro_batch import Arguments, Inputs, MicroBatch, Terms
from dsframe.tasks.task import Sum, Task, loss_and_terms, sums, tensor_of
from dsframe.values import tensors_of

if TYPE_CHECKING:
    from dsframe.model.weight_watch import WeightWatch


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Returns ``model`` applied to ``inputs``: a dict becomes keyword arguments, a tuple or list positional ones,
    anything else, including a packed sequence, a single argument."""
    if isinstance(inputs, Arguments):
        return model(*inputs.args, **inputs.kwargs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence):
        return model(*inputs)
    return model(inputs)


def outputs_of(model: nn.Module, inputs: Inputs, watch: WeightWatch | None) -> Any:
    """Does the same as :func:`call`, watched, and registers the model's output classes as pytree nodes."""
    with _watched(watch):
        outputs = call(model, inputs)
    output_classes.register(outputs)
    return outputs


def loss_of(
    task: Task,
    outputs: Any,
    batch: MicroBatch,
    terms: Terms,
    watch: WeightWatch | None = None,
    *,
    reaches: bool = False,
) -> Tensor:
    """Returns the task's loss of a micro-batch times its weight, a scalar; 0 if the weight is 0. Adds the other values
    that the task returns to ``terms``. ``reaches``: backward passes have to reach the model on every rank, even if the
    loss does not depend on outputs, as for a skipped batch. Raises TaskError if the result is not a loss."""
    if batch.inspect:
        with nullcontext() if watch is None else watch.trial(), _watched(watch):
            batch.inspect(outputs, batch.targets)
    with _watched(watch), batch.draws.of_loss() if batch.draws else nullcontext(), elsewhere(watch):
        loss = _weighted_loss(task, outputs, batch, terms, reaches)
    if watch is not None:
        watch.computed(loss)
    return loss


def _weighted_loss(task: Task, outputs: Any, batch: MicroBatch, terms: Terms, reaches: bool) -> Tensor:
    weight = batch.weight
    if not isinstance(weight, Tensor):
        loss = _loss(task, outputs, batch.targets, terms, reaches)
        return loss if weight == 1.0 else loss * weight
    counts = weight > 0

    def zero_unless_counted(value: Tensor) -> Tensor:
        return torch.where(counts, value, torch.zeros_like(value))

    # A mean over nothing is NaN, and so are its gradients.
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(zero_unless_counted)  # type: ignore[no-untyped-call]
    return zero_unless_counted(_loss(task, outputs, batch.targets, terms, reaches) * weight)


def _loss(task: Task, outputs: Any, targets: Any, terms: Terms, reaches: bool) -> Tensor:
    source = f"{type(task).__name__}.loss"
    returned, more = loss_and_terms(task.loss(outputs, targets))
    for name, term in (sums(more, source) if more else {}).items():
        if name == "loss":
            raise TaskError(f'{source}: "loss" is the loss itself; give what is returned with it another name')
        detached = Sum(term.total.detach(), term.count)
        terms[name] = terms[name] + detached if name in terms else detached
    loss = tensor_of(returned, source)
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise TaskError(
            f"{source}: returned a tensor without a gradient, so nothing would be trained; compute "
            "it from the outputs, without .item(), .detach() or torch.no_grad()"
        )
    if reaches and loss.requires_grad and loss.is_leaf:
        trained = (leaf for leaf in tensors_of(outputs) if leaf.requires_grad)
        loss = cast(Tensor, _Reaching.apply(loss, *trained))  # type: ignore[no-untyped-call]
    return loss


class _Reaching(torch.autograd.Function):
    """Connects a loss that does not depend on the outputs with them, by gradients of zero."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *outputs: Tensor) -> Tensor:
        ctx.forms = [(output.shape, output.dtype) for output in outputs]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0], *(gradients[0].new_zeros(shape, dtype=dtype) for shape, dtype in ctx.forms)


def backward(loss: Tensor, run: Callable[[Tensor], Any], watch: WeightWatch | None) -> None:
    """Calls ``run(loss)``, a backward pass, watched."""
    with nullcontext() if watch is None else watch.backward():
        run(loss)


def _watched(watch: WeightWatch | None) -> AbstractContextManager[None]:
    return nullcontext() if watch is None else watch.inside()


def elsewhere(watch: WeightWatch | None) -> AbstractContextManager[None]:
    """Encloses a loss or metrics. Refuses uses of model parts that other ranks have."""
    return nullcontext() if watch is None else watch.elsewhere()

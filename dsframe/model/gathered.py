"""Gathers weights of which ranks hold shards: for losses that read weights, or for a complete step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.stateless import _reparametrize_module

from dsframe.errors import TaskError


class Shards(ABC):
    """How a library shards parameters. The engine's module for that library adds an instance to ``LIBRARIES``."""

    others: Callable[[nn.Module], Mapping[str, Tensor]] | None = None
    """Returns the complete parameters by name, if those are other objects, which the model contains while modules run."""

    never_whole = ""
    """If each rank computes with its part and never has complete parameters: what to do instead."""

    @abstractmethod
    def cuts(self, weight: Any) -> bool:
        """Returns True for a parameter that this library has sharded."""

    @abstractmethod
    def is_whole(self, weight: Any) -> bool:
        """Returns True if this rank has all of such a parameter now."""

    def gathering(self, weights: Sequence[Any]) -> AbstractContextManager[None]:
        """**Collective.** Encloses :meth:`copies`, and autograd's check of the shapes of ``weights``."""
        return nullcontext()

    @abstractmethod
    def copies(self, weights: Sequence[Any]) -> list[Tensor]:
        """**Collective.** Returns complete copies of such parameters, in the dtype of the model's computation."""

    def keep(self, weight: Any) -> None:  # noqa: B027  # most libraries need nothing
        """Copies changes of a complete ``weight`` to this rank's shard, if the shard is separate memory."""

    @abstractmethod
    def gradients(self, weights: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
        """**Collective.** Returns the parameters' gradients, given those of this rank's copies."""


LIBRARIES: list[Shards] = []


def library_of(weight: Any) -> Shards | None:
    """Returns the library that shards ``weight``; None for a plain parameter."""
    return next((library for library in LIBRARIES if library.cuts(weight)), None)


def is_whole(weight: Any) -> bool:
    """Returns False if this rank has only a shard of ``weight`` now."""
    library = library_of(weight)
    return library is None or library.is_whole(weight)


@contextmanager
def gathered(module: nn.Module) -> Iterator[nn.Module]:
    """**Collective.** Gathers all weights of ``module`` inside the context, on every engine, for a loss to read::

        with dsframe.gathered(self.net) as net:
            penalty = sum(weight.square().sum() for weight in net.parameters())

    Gradients reach the weights. Take the weights from the module inside the context: earlier references are shards. If
    ranks hold shards (ZeRO-3, FSDP), each gets a copy of the module's weights, which lives until the backward pass.
    Raises TaskError if the copy was written to: use :meth:`Task.after_step <dsframe.Task.after_step>` to write.
    """
    if all(is_whole(weight) for weight in module.parameters()):
        yield module
        return
    with whole(module), register_module_forward_pre_hook(_refuse_calls(module)):
        yield module


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """**Collective.** Replaces shards by complete copies. Raises TaskError if one was written to."""
    places = {  # a module may have two names, and torch would leave a copy in it
        f"{prefix}.{key}".removeprefix("."): weight
        for prefix, part in module.named_modules()
        for key, weight in part._parameters.items()
        if weight is not None and not is_whole(weight)
    }
    sharded = {weight: name for name, weight in reversed(places.items())}
    if not sharded:
        yield
        return
    copies = dict(zip(sharded, _copies(list(sharded)), strict=True))
    if not torch.is_grad_enabled():  # a model may take derivatives in an evaluation nevertheless
        for weight, copy in copies.items():
            copy.requires_grad_(weight.requires_grad)
    before = [(copy._version, copy.data_ptr()) for copy in copies.values()]
    recurrent = [(inner, inner._flat_weights) for inner in module.modules() if isinstance(inner, nn.RNNBase)]
    with _reparametrize_module(module, {name: copies[weight] for name, weight in places.items()}):
        for inner, _ in recurrent:  # RNNs also keep their weights in a list
            inner._flat_weights = [getattr(inner, name, None) for name in inner._flat_weights_names]
        try:
            yield
        finally:
            for inner, flat in recurrent:
                inner._flat_weights = flat
    for name, copy, then in zip(sharded.values(), copies.values(), before, strict=True):
        if (copy._version, copy.data_ptr()) != then:
            raise TaskError(
                f"{name} was written where weights are gathered, which changes only a copy of it; define "
                "after_step(name, weight) in the task to write to weights"
            )


def _refuse_calls(module: nn.Module) -> Any:
    """Returns a hook that refuses calls, because a library's hooks expect its own weights in a called module."""
    inside = set(module.modules())

    def refuse(called: nn.Module, _: Any) -> None:
        if called in inside:
            raise TaskError(
                f"{type(called).__name__.removeprefix('FSDP')} is called inside of dsframe.gathered(), which is for reading "
                "weights; call it before or after"
            )

    return refuse


def _copies(weights: list[Any]) -> tuple[Tensor, ...]:
    library: Any = library_of(weights[0])
    with library.gathering(weights):
        copies: tuple[Tensor, ...] = _Copies.apply(library, *weights)  # type: ignore[no-untyped-call]
    return copies


class _Copies(Function):
    """Copies all weights in one function, so that ranks reduce the same gradients in the same order."""

    @staticmethod
    def forward(ctx: Any, library: Shards, *weights: Any) -> tuple[Tensor, ...]:
        copies = library.copies(weights)
        ctx.library, ctx.weights = library, weights
        ctx.mark_non_differentiable(
            *(copy for copy, weight in zip(copies, weights, strict=True) if not weight.requires_grad)
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        trained = [number for number, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        reduced = ctx.library.gradients(
            [ctx.weights[number] for number in trained], [gradients[number] for number in trained]
        )
        returned: list[Tensor | None] = [None] * len(gradients)
        for number, gradient in zip(trained, reduced, strict=True):
            returned[number] = gradient
        return None, *returned

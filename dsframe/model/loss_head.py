"""The switch ``loss_chunk_tokens``: a language model's output layer computes the loss itself, a slice of tokens at a time.

The layer keeps its name, its parameters and its place, so no engine knows of it: it is called as before, with its weight there.
Only its class is another, whose forward pass looks for targets. They come with the inputs
(``forward.TargetedInputs``); without them, as for text that is generated, the layer gives logits.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, cast

from torch import Tensor, nn

from dsframe.config import Config
from dsframe.errors import TaskError
from dsframe.tasks import chunked_loss
from dsframe.tasks.layers import TiedLayer
from dsframe.tasks.task import Task

TARGETS = "dsframe_targets"
"""Keyword argument of the model's call that brings the targets."""


def settle_chunks(config: Config, task: Task, model: nn.Module) -> bool:
    """Switches it on where the file asks for it; whether it does. Raises TaskError where the model has no such layer."""
    wanted = config.settings.model.loss_chunk_tokens
    if wanted is None:
        return False
    head = task.head(model)
    whose = f"loss_chunk_tokens: {type(task).__name__}"
    if head is None:
        raise TaskError(f"{whose} has no head(), which names the layer that gives the logits; remove loss_chunk_tokens")
    switch(head, wanted, whose)
    listen(model, head)
    return True


def switch(head: nn.Module, wanted: int | Literal["auto"], whose: str = "loss_chunk_tokens") -> None:
    """Makes the layer compute the loss where it has targets. Raises TaskError, which begins with ``whose``, for no linear layer."""
    plain = isinstance(head, TiedLayer) and head.is_linear
    if not plain and getattr(type(head), "forward", None) is not nn.Linear.forward:
        raise TaskError(f"{whose}: its logits come from a {type(head).__name__}, not from a linear layer; remove it")
    layer, layer_class = cast(Any, head), cast(Any, type(head))
    layer.__class__ = _of(layer_class)
    layer.chunk_tokens = chunked_loss.tokens_of(len(layer.weight)) if wanted == "auto" else wanted
    layer.targets = None


def listen(model: nn.Module, head: nn.Module) -> None:
    """Hands the targets with which ``model`` is called to its ``head``, for the time of that call."""
    layer: Any = head

    def take(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        layer.targets = named.pop(TARGETS, None)
        return inputs, named

    def forget(module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        layer.targets = None

    model.register_forward_pre_hook(take, with_kwargs=True, prepend=True)
    model.register_forward_hook(forget, always_call=True)


@functools.cache
def _of(layer_class: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer that computes the loss where it has targets. It has the same name, by which files name classes."""

    def forward(self: Any, inputs: Tensor) -> Tensor:
        if self.targets is None:
            return layer_class.forward(self, inputs)  # type: ignore[no-any-return]
        bias = getattr(self, "bias", None)
        return chunked_loss.cross_entropy(inputs, self.weight, bias, self.targets, self.chunk_tokens)

    return type(layer_class.__name__, (layer_class,), {"forward": forward, "__module__": __name__})

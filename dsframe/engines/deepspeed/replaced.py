"""Layers that DeepSpeed replaces by its own, which only take over the weights: detects what would be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dsframe.errors import EngineError
from dsframe.model.gathered import Shards
from dsframe.model.user_spaces import HOOKS


class OwnParts(Shards):
    """Parameters of which each rank has, and computes with, a part."""

    def is_whole(self, weight: Any) -> bool:
        """Always False."""
        return False

    def copies(self, weights: Any) -> list[Tensor]:
        """Raises EngineError."""
        raise EngineError(f"dsframe.gathered: no rank gathers whole weights; {self.never_whole}")

    def gradients(self, weights: Any, gradients: Any) -> list[Tensor]:
        """Raises EngineError, as :meth:`copies`."""
        return self.copies(weights)


def _hooks(layer: nn.Module) -> list[Any]:
    hooks = [hook for attribute in HOOKS for hook in getattr(layer, attribute).values()]
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("dsframe.")]


@contextmanager
def replacing(model: nn.Module, section: str, is_plain: Callable[[nn.Module], bool], remedy: str) -> Iterator[None]:
    """Encloses DeepSpeed's work on ``model``. Raises EngineError if it replaces layers with hooks, or not
    ``is_plain``."""
    before = list(model.named_modules(remove_duplicate=False))
    lost: dict[nn.Module, str] = {}
    for _, layer in before:  # recorded now, because DeepSpeed adds its own hooks
        if _hooks(layer):
            lost[layer] = "hooks"
        elif "forward" in vars(layer) or not is_plain(layer):
            lost[layer] = f"class, {type(layer).__name__},"
    try:
        yield
    except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
        what = f"{section}: DeepSpeed cannot shard this {type(model).__name__}, in which layers may share a weight"
        raise EngineError(f"{what}: {error}; {remedy}") from error
    after = dict(model.named_modules(remove_duplicate=False))
    replaced = {name: layer for name, layer in before if after.get(name) is not layer}
    for name, layer in before:
        if name in replaced and layer in lost:
            raise EngineError(
                f"{section}: DeepSpeed puts a layer without its {lost[layer]} in the place of {name}; {remedy}"
            )
        if name not in replaced and any(layer is other for other in replaced.values()):
            raise EngineError(f"{section}: {name} is used at several places of the model; {remedy}")

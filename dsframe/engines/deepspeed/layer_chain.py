"""Checks that a model has and does nothing besides its layers: a pipeline's stages would omit it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.errors import TaskError
from dsframe.model.build import small_copy
from dsframe.model.persistent import persistent_buffers
from dsframe.model.user_spaces import HOOKS
from dsframe.tasks.task import Task, gives
from dsframe.values import tensors_of

_REMEDY = "put it into a layer, or train without a pipeline"


def refuse_own_model(task: Task) -> None:
    """Raises TaskError if a task with ``layers()`` has a different ``model()``, which other engines would train."""
    if gives(task, "model") and not _returns_layers(task):
        raise TaskError(
            f"{type(task).__name__} has layers() and a model() of its own; a pipeline would train the layers, and all other "
            "engines the model; leave one of them out"
        )


class _Asked(Task):
    """Base class inserted between a task's classes and :class:`Task`; its model is an opaque object."""

    made: Any = object()

    def model(self) -> Any:
        return self.made


def _returns_layers(task: Task) -> bool:
    """True if ``task.model()`` returns what ``super().model()`` does; tested on a copy of the task."""
    twin = copy.copy(task)
    try:
        twin.__class__ = type(type(task).__name__, (type(task), _Asked), {})
        return twin.model() is _Asked.made
    except Exception:  # ``model()`` uses the result
        return False


def refuse_more(whole: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raises TaskError for tensors, hooks and modes of ``whole`` that its layers do not have."""
    name = type(whole).__name__
    tensors = {id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
    held: list[tuple[str, Tensor]] = [*whole.named_parameters(), *persistent_buffers(whole).items()]
    if missing := [key for key, tensor in held if id(tensor) not in tensors]:
        raise TaskError(f"{', '.join(missing)} of {name} is in none of its layers, so no stage has it; {_REMEDY}")
    inside = {module for layer in layers for module in layer.modules()}
    for module in whole.modules():
        if module not in inside and any(getattr(module, hooks) for hooks in HOOKS):
            raise TaskError(
                f"{type(module).__name__} has a hook (register_forward_hook and the like), and a pipeline calls its layers, not "
                f"{type(module).__name__} itself; {_REMEDY}"
            )
    kept = [module for module in whole.modules() if module in inside]  # cut() may create layers
    for switch in ("eval", "train"):
        getattr(whole, switch)()
        modes = [module.training for module in kept]
        for layer in layers:
            getattr(layer, switch)()
        changed = [type(module).__name__ for module, mode in zip(kept, modes, strict=True) if module.training != mode]
        if changed:
            raise TaskError(
                f"{name}.{switch}() leaves {', '.join(dict.fromkeys(changed))} in another mode than the layers' own "
                f"{switch}(), which a pipeline calls; override train() of a class for that layer, or train without a pipeline"
            )


class Trial:
    """A copy of a model and of its layers, which must compute the same."""

    def __init__(self, whole: nn.Module, layers: list[nn.Module], seed: int) -> None:
        self._whole, self._layers, self._seed = whole, layers, seed

    @classmethod
    def of(cls, whole: nn.Module, layers: list[nn.Module], seed: int) -> Trial | None:
        """Returns None if a copy would need much memory, or cannot be made."""
        if (copied := small_copy(whole, (whole, layers))) is None:
            return None
        whole_copy, layer_copies = copied
        return cls(whole_copy, layer_copies, seed)

    def __call__(self, inputs: Tensor) -> None:
        """Raises TaskError if outputs in evaluation mode differ, for at most two rows."""
        rows = inputs[:2].cpu()
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            try:
                torch.manual_seed(self._seed)
                expected = self._whole.eval()(rows.clone())
            except Exception:  # no stage calls it, so it may not be callable
                return
            torch.manual_seed(self._seed)
            stream: Any = rows
            for layer in self._layers:
                stream = layer.eval()(stream)
        chained, expected_tensors = (tensors_of(part) for part in (stream, expected))
        if not (len(chained) == len(expected_tensors) and all(map(_close, chained, expected_tensors))):
            raise TaskError(
                f"the layers of {type(self._whole).__name__}, one after the other, compute something else than it does itself; "
                "cut() has to give all that its forward() does, such as activations between layers"
            )


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b.to(a.dtype), rtol=1e-3, atol=1e-4, equal_nan=True)

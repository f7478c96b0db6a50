"""Methods of nn.Module that a model overrides: libraries call them as torch does, and count on what they give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from dsframe.errors import TaskError

_CALLED = ("train", "parameters", "named_parameters", "buffers", "named_buffers", "named_modules")


def refuse(model: nn.Module, task: str) -> None:
    """Raises TaskError for an override that cannot be called as nn.Module's, or that leaves parameters out.

    ``task``: the name of the task's class.
    """
    for module in model.modules():
        cls = type(module)
        for name in _CALLED:
            theirs, torchs = getattr(cls, name), getattr(nn.Module, name)
            if theirs is not torchs and not _callable_alike(theirs, torchs):
                wanted = str(inspect.signature(torchs)).partition(" ->")[0]
                raise TaskError(
                    f"{task}: {cls.__name__}.{name}{inspect.signature(theirs)} overrides nn.Module.{name}, and torch calls it as "
                    f"{name}{wanted}; take the same arguments"
                )
        overridden = (
            cls.parameters is not nn.Module.parameters or cls.named_parameters is not nn.Module.named_parameters
        )
        if overridden and _ids(module.parameters()) != _ids(nn.Module.parameters(module)):
            raise TaskError(
                f"{task}: {cls.__name__}.parameters() gives other parameters than the model has, or in another order; remove it, "
                "freeze what is not to be trained (requires_grad_(False)), and give rates by parameter_groups"
            )


def _ids(parameters: Iterator[nn.Parameter]) -> list[int]:
    return [id(parameter) for parameter in parameters]


def _callable_alike(theirs: Callable[..., Any], torchs: Callable[..., Any]) -> bool:
    signature = inspect.signature(theirs)
    _, *arguments = inspect.signature(torchs).parameters
    try:
        signature.bind(None)
        signature.bind(None, *[None] * len(arguments))
        signature.bind(None, **dict.fromkeys(arguments))
    except TypeError:
        return False
    return True

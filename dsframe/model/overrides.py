"""Checks a model's overrides of nn.Module's methods, which libraries call and rely on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.jit._trace import TopLevelTracedModule

from dsframe.errors import TaskError

_MODULES = ("modules", "named_modules", "children", "named_children")
_CALLED = ("train", "parameters", "named_parameters", "buffers", "named_buffers", "named_modules", "apply", "to")
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "PipelineEngine")
_WEIGHTS = ("parameters", "named_parameters", *_MODULES)


def refuse(model: Any, task: str) -> None:
    """Raises TaskError if the model is not an nn.Module, or if an override has another signature or omits parameters.
    ``task``: the name of the task's class."""
    if not isinstance(model, nn.Module):
        raise TaskError(f"{task}.model() returned {type(model).__name__}, not a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule) and not isinstance(model, TopLevelTracedModule):
        raise TaskError(
            f"{task}: the model is compiled by torch.jit.script, which takes no hooks, and the engines need them; return the "
            'module itself (and write "compile": true in the file\'s "model" section), or a module that calls the compiled one'
        )
    for module in _walk(model):
        cls = type(module)
        if cls.__name__ in _WRAPPERS and cls.__module__.startswith(("torch.", "deepspeed.", "horovod.")):
            raise TaskError(
                f"{task}: the model contains a {cls.__name__}, which spreads it over devices or processes itself; return the "
                "module that it wraps, and let the file choose the engine"
            )
        if not _lacks_unknown_names(module):
            raise TaskError(
                f"{task}: {cls.__name__}.__getattr__ must raise AttributeError for a name that it does not know: torch and the "
                "libraries ask modules for attributes that they may not have"
            )
        for name in _CALLED:
            theirs, torchs = getattr(cls, name), getattr(nn.Module, name)
            if theirs is not torchs and not _callable_alike(theirs, torchs):
                wanted = str(inspect.signature(torchs)).partition(" ->")[0]
                raise TaskError(
                    f"{task}: {cls.__name__}.{name}{inspect.signature(theirs)} overrides nn.Module.{name}, and torch calls it as "
                    f"{name}{wanted}; take the same arguments"
                )
        if _overrides(cls, _MODULES) and _hides(module):
            raise TaskError(
                f"{task}: {cls.__name__}.modules() or children() gives other modules than the model has; remove it: torch and the "
                "libraries call it"
            )
        if _overrides(cls, _WEIGHTS) and _leaves_out(module):
            raise TaskError(
                f"{task}: {cls.__name__}.parameters() gives other parameters than the model has, or in another order; remove it, "
                "freeze what is not to be trained (requires_grad_(False)), and give rates by parameter_groups"
            )


def _overrides(cls: type[nn.Module], names: Collection[str]) -> bool:
    return any(getattr(cls, name) is not getattr(nn.Module, name) for name in names)


def _walk(module: nn.Module) -> list[nn.Module]:
    below = [part for child in module._modules.values() if child is not None for part in _walk(child)]
    return list(dict.fromkeys([module, *below]))


def _hides(module: nn.Module) -> bool:
    children = [child for child in module._modules.values() if child is not None]
    return list(module.modules()) != _walk(module) or list(module.children()) != list(dict.fromkeys(children))


def _leaves_out(module: nn.Module) -> bool:
    weights = [weight for part in _walk(module) for weight in part._parameters.values() if weight is not None]
    return list(map(id, module.parameters())) != list(dict.fromkeys(map(id, weights)))


def _lacks_unknown_names(module: nn.Module) -> bool:
    """Returns True if an unknown name raises AttributeError, which ``hasattr`` and ``getattr`` with a default need."""
    try:
        return not hasattr(module, "_dsframe_no_such_name")
    except Exception:
        return False


def _callable_alike(theirs: Callable[..., Any], torchs: Callable[..., Any]) -> bool:
    signature = inspect.signature(theirs)
    _, *arguments = inspect.signature(torchs).parameters.values()
    optional = [argument.name for argument in arguments if argument.default is not argument.empty]
    required = [None] * (len(arguments) - len(optional) and 1)  # to() takes any number of arguments
    try:
        signature.bind(None, *required)
        signature.bind(None, *required, *[None] * len(optional))
        signature.bind(None, *required, **dict.fromkeys(optional))
    except TypeError:
        return False
    return True

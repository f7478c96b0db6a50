"""Finds user code that changes gradients nonlinearly during a backward pass: a clip, a sign, a norm.

Gradients there are of one micro-batch's loss, so the sum of such changes depends on the micro-batch size. Hooks of
outputs and modules, and the ``backward`` of a ``torch.autograd.Function``, are called twice in the first step: with the
gradients, and with twice the gradients. A ``backward`` that may run autograd is not tested, because a second call would
accumulate gradients.
"""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dsframe.host import source_files
from dsframe.model.user_state import codes_in
from dsframe.text import Say
from dsframe.values import tensors_of

_DIFFERENTIATES = {"backward", "grad", "autograd", "enable_grad", "func", "checkpoint"}
"""Names in code that runs autograd."""
_PLAIN = (int, float, complex, str, NoneType, Tensor, torch.dtype, torch.device)


def _is_linear(function: Callable[..., Any], gradients: tuple[Any, ...], returned: Any) -> bool:
    """Returns True if twice the ``gradients`` give twice ``returned``, or if ``function`` cannot be called again."""
    devices = {leaf.device for leaf in tensors_of(gradients) if leaf.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            if isinstance(function, MethodType):  # it may count in its object
                function = MethodType(function.__func__, copy.copy(function.__self__))
            again = function(*tree_map_only(Tensor, lambda gradient: 2 * gradient, gradients))
        return all(
            torch.allclose(second, 2 * first, rtol=1e-3, atol=0.0)
            for first, second in zip(tree_leaves(returned), tree_leaves(again), strict=True)
            if isinstance(first, Tensor) and isinstance(second, Tensor)
        )
    except Exception:  # for example a context whose tensors can be read only once, or results of varying shape
        return True


def examining(hook: Callable[[Tensor], Any], place: str, say: Say) -> Callable[[Tensor], Any]:
    """Returns ``hook``, a hook on an output's gradient registered at ``place``, wrapped to test it."""

    def examined(gradient: Tensor) -> Any:
        returned = hook(gradient)
        if returned is not None and not _is_linear(hook, (gradient,), returned):
            say(f"{place} changes the gradient of an output")
        return returned

    return examined


def examine_hooks(model: nn.Module, say: Say) -> None:
    """Tests each backward hook of the modules of ``model`` at its first call."""
    for name, module in model.named_modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            for key, hook in hooks.items():
                hooks[key] = _examined_once(hook, name or type(module).__name__, say)


def _examined_once(hook: Callable[..., Any], name: str, say: Say) -> Callable[..., Any]:
    done = False

    def examined(module: nn.Module, *gradients: Any) -> Any:
        nonlocal done
        returned = hook(module, *gradients)
        if done or returned is None:
            return returned
        done = True
        if not _is_linear(partial(hook, module), gradients, returned):
            say(f"a backward hook of {name} changes gradients")
        return returned

    return examined


def examine_functions(nodes: Iterable[Any], say: Say) -> None:
    """Tests each of the user's ``torch.autograd.Function`` classes among a loss's ``nodes`` once."""
    by_class = {function: node for node in nodes if (function := getattr(type(node), "_forward_cls", None))}
    for function, node in by_class.items():
        if isinstance(function.backward, FunctionType) and _may_be_asked(function.backward, node):
            _examine_function(node, function, say)


def _may_be_asked(backward: FunctionType, context: Any) -> bool:
    """Returns True if ``backward`` and the user's functions in it use only torch and values in ``context``."""
    known = {*dir(builtins), *dir(torch), *dir(nn.functional), *dir(Tensor), *dir(type(context))} - _DIFFERENTIATES
    functions = [backward]
    for function in functions:
        for name in {name for code in codes_in(function.__code__) for name in code.co_names}:
            value = function.__globals__.get(name, None if name in known else getattr(context, name, function))
            if isinstance(value, FunctionType) and value is not function:
                functions += [] if value in functions or value.__module__.startswith("torch.") else [value]
            elif not (isinstance(value, ModuleType) or all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(value))):
                return False
    codes = [function.__code__ for function in functions]
    return all(source_files.is_users(code.co_filename) and not code.co_freevars for code in codes)


def _examine_function(node: Any, function: Any, say: Say) -> None:
    given: tuple[Any, ...] = ()

    def note(gradients: Any) -> None:
        nonlocal given
        given = tree_map_only(Tensor, Tensor.clone, tuple(gradients))

    def examine(returned: Any, _: Any) -> None:
        for handle in handles:
            handle.remove()
        if not _is_linear(partial(function.backward, node), given, returned):
            say(f"{function.__name__}.backward changes gradients")

    handles = node.register_prehook(note), node.register_hook(examine)

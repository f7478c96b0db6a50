"""Finds user code that changes gradients nonlinearly during a backward pass: a clip, a sign, a norm.

Gradients there are of one micro-batch's loss, so the sum of such changes depends on the micro-batch size. Hooks of
outputs and modules, and the ``backward`` of a ``torch.autograd.Function``, are called twice in the first step: with the
gradients, and with twice the gradients. A ``backward`` that may run autograd is not tested, because a second call would
accumulate gradients.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
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
    """Returns True if twice the tensors of ``gradients`` give twice ``returned``, or if ``function`` cannot be called again."""
    devices = {leaf.device for leaf in tensors_of(gradients) if leaf.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            if isinstance(function, MethodType):  # it may count in its object
                twin = object.__new__(type(function.__self__))  # copy.copy of an FSDP module would call __init__
                vars(twin).update(vars(function.__self__))
                function = MethodType(function.__func__, twin)
            again = function(*tree_map_only(Tensor, lambda gradient: 2 * gradient, gradients))
        return all(
            torch.allclose(second, 2 * first, rtol=1e-3, atol=0.0)
            for first, second in zip(tree_leaves(returned), tree_leaves(again), strict=True)
            if isinstance(first, Tensor) and isinstance(second, Tensor)
        )
    except Exception:  # for example a context whose tensors can be read only once, or results of varying shape
        return True


def examining(
    hook: Callable[..., Any], text: str, say: Say | None, mode: AbstractContextManager[Any]
) -> Callable[..., Any]:
    """Returns ``hook`` of a tensor or module, wrapped: it is called in ``mode``, which torch turns off in backward passes,
    and its first result is tested: ``say(text)`` if it is not linear."""
    tested = False

    def examined(*args: Any) -> Any:
        nonlocal tested
        with mode:
            returned = hook(*args)
        if say and not tested and returned is not None:
            tested = True
            if not _is_linear(hook, args, returned):
                say(text)
        return returned

    return examined


def examine_hooks(model: nn.Module, say: Say, mode: AbstractContextManager[Any]) -> None:
    """Wraps each backward hook of the modules of ``model``."""
    for name, module in model.named_modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            for key, hook in hooks.items():
                text = f"a backward hook of {name or type(module).__name__} changes gradients"
                hooks[key] = examining(hook, text, say, mode)


def examine_functions(nodes: Iterable[Any], say: Say, mode: AbstractContextManager[Any]) -> None:
    """Calls the ``backward`` of the user's ``torch.autograd.Function`` classes among a loss's ``nodes`` in ``mode``, and
    tests each class once."""
    by_class = {}
    for node in nodes:
        backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
        if isinstance(backward, FunctionType) and source_files.is_users(inspect.unwrap(backward).__code__.co_filename):
            node.register_prehook(lambda _: mode.__enter__() and None)
            node.register_hook(lambda *_: mode.__exit__(None, None, None))
            by_class[type(node)._forward_cls] = node
    for function, node in by_class.items():
        if _may_be_asked(function.backward, node):
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

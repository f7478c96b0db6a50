"""Finds code that takes derivatives during a step, which needs complete weights, before an engine is created."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.autograd import Function

from dsframe.host.source_files import is_users
from dsframe.model.user_state import codes_in, words_of
from dsframe.tasks.task import Task

_LIBRARIES = ("torch.", "dsframe.", "builtins", "collections", "abc", "typing", "enum")
_COLLECTIVE = re.compile("(all_|reduce|broadcast|gather|scatter|send|isend|barrier)")
_TRANSFORMS = frozenset({"functional_call", "hessian", "jacfwd", "jacobian", "jacrev", "jvp", "vhp", "vjp", "vmap"})


def line_of(task: Task, model: nn.Module, does: Callable[[CodeType, dict[str, Any]], bool] | None = None) -> str:
    """Returns file and line of a method of the task or model, or of a function that it calls, that takes derivatives, or
    ``does`` this; "" if none. Inspects names in compiled code, so the code may never run."""
    ahead = [value for value in vars(task).values() if isinstance(value, FunctionType)]
    for cls in dict.fromkeys(cls for owner in (task, *model.modules()) for cls in type(owner).__mro__):
        if not f"{cls.__module__}.".startswith(_LIBRARIES):
            ahead += _methods(cls)
    seen: set[FunctionType] = set()
    while ahead:
        function = ahead.pop()
        if function in seen:
            continue
        seen.add(function)
        for code in codes_in(function.__code__):
            if (does or _differentiates)(code, function.__globals__):
                return f"{code.co_filename}:{code.co_firstlineno}"
            called = [function.__globals__.get(name) for name in code.co_names]
            ahead += [
                other for other in called if isinstance(other, FunctionType) and other.__module__ == function.__module__
            ]
            for other in called:
                if (
                    isinstance(other, type)
                    and issubclass(other, Function)
                    and not other.__module__.startswith("torch.")
                ):
                    ahead += _methods(other)
    return ""


def _methods(cls: type) -> Iterator[FunctionType]:
    for value in vars(cls).values():
        method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(method := inspect.unwrap(method) if callable(method) else method, FunctionType):
            yield method


def counts_ranks(code: CodeType, _: Any) -> bool:
    """Returns True if the user's code asks for the number of processes, and not for a collective of its own."""
    words = words_of(code)
    asks = not words.isdisjoint(("get_world_size", "WORLD_SIZE")) and not any(map(_COLLECTIVE.match, words))
    return asks and is_users(code.co_filename) and code.co_name != "__init__"


def asks_for_gradients(code: CodeType, _: Any) -> bool:
    """Returns True if the user's code asks whether gradients are on."""
    asks = {"is_grad_enabled", "grad_fn", *(["requires_grad"] if code.co_name in ("forward", "loss") else [])}
    return is_users(code.co_filename) and not asks.isdisjoint(code.co_names)


def _differentiates(code: CodeType, variables: dict[str, Any]) -> bool:
    names = set(code.co_names)
    keywords = (constant for constant in code.co_consts if isinstance(constant, tuple))
    if any("create_graph" in keyword for keyword in keywords) or ("grad" in names and names & {"autograd", "backward"}):
        return True
    imported = {name for name in names if str(getattr(variables.get(name), "__module__", "")).startswith("torch.")}
    direct = imported if not names & {"func", "functional"} else names
    return bool(direct & _TRANSFORMS) or "grad" in imported or {"func", "grad"} <= names

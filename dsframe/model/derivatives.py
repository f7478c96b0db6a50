"""Finds code that takes derivatives during a step, which needs complete weights, before an engine is created."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.autograd import Function

from dsframe.model.user_state import codes_in
from dsframe.tasks.task import Task

_LIBRARIES = ("torch.", "dsframe.", "builtins", "collections", "abc", "typing", "enum")
_TRANSFORMS = frozenset({"functional_call", "hessian", "jacfwd", "jacobian", "jacrev", "jvp", "vhp", "vjp", "vmap"})


def line_of(task: Task, model: nn.Module) -> str:
    """Returns file and line of a method of the task or model, or of a function that it calls, that takes derivatives;
    "" if none. Inspects names in compiled code, so the code may never run."""
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
            if _differentiates(code, function.__globals__):
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


def _differentiates(code: CodeType, variables: dict[str, Any]) -> bool:
    names = set(code.co_names)
    keywords = (constant for constant in code.co_consts if isinstance(constant, tuple))
    if any("create_graph" in keyword for keyword in keywords) or ("grad" in names and names & {"autograd", "backward"}):
        return True
    imported = {name for name in names if str(getattr(variables.get(name), "__module__", "")).startswith("torch.")}
    direct = imported if not names & {"func", "functional"} else names
    return bool(direct & _TRANSFORMS) or "grad" in imported or {"func", "grad"} <= names

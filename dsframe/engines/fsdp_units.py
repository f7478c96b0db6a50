"""Chooses the modules that FSDP gathers as one unit: the model's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dsframe.engines.lent import Alike, Writable, lend, take_back
from dsframe.errors import EngineError
from dsframe.model import switches
from dsframe.values import filled, tensors_of


def named(model: nn.Module, wanted: list[str]) -> list[nn.Module]:
    """Returns the units, innermost first: instances of the classes ``wanted``, or the model's blocks.

    A module that shares a parameter with another part of the model stays with the whole model, because a parameter
    belongs to one unit. Raises EngineError, with the model's class names, for a class that the model does not have.
    """
    inner = [module for module in model.modules() if module is not model and any(True for _ in module.parameters())]
    inner = [module for module in inner if _has_forward(module)]  # else nothing calls it
    class_counts = Counter(type(module).__name__ for module in inner)
    missing = [name for name in wanted if name not in class_counts]
    if missing:
        known = ", ".join(f"{name} ({count})" for name, count in class_counts.most_common())
        raise EngineError(f"fsdp.wrap: this model has no {', '.join(missing)} with a forward(); it has {known}")
    block = switches.repeated(model)
    names = wanted or ([block] if block else _listed(model))
    alone = _owning(model)
    return [module for module in reversed(inner) if type(module).__name__ in names and alone(module)]


def keep_arguments(units: Iterable[nn.Module]) -> Callable[[], None]:
    """Gives ``units`` the lists, dicts and dataclasses that they are called with, to which they may add losses, and tensors that
    they may write to. FSDP's hooks, which are added before the returned function is called, give copies, and views (torch 2.13,
    ``replace_grad_tensors``)."""
    kept = [(unit, _Arguments()) for unit in units]
    for unit, arguments in kept:
        unit.register_forward_pre_hook(arguments.put_back, prepend=True, with_kwargs=True)
        unit.register_forward_hook(take_back, with_kwargs=True)

    def close() -> None:
        for unit, arguments in kept:
            unit.register_forward_pre_hook(arguments.keep, prepend=True, with_kwargs=True)

    return close


class _Arguments:
    _given: Any = None

    def keep(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._given = args, kwargs

    def put_back(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        given, self._given = self._given, None
        if torch.compiler.is_compiling() and all(
            isinstance(one, (Tensor, NoneType)) for one in (*args, *kwargs.values())
        ):
            return args, kwargs  # a compiler cannot trace what follows
        pairs = list(zip(tensors_of(given), tensors_of((args, kwargs)), strict=True))
        views = {own: view for own, view in pairs if own is not view}
        lent = Alike(lambda own: lend(own, Writable.apply(views.get(own, own))), views)  # type: ignore[no-untyped-call]
        of_views = {view: lent(own) for own, view in pairs if own is not view}
        return filled(given, tree_map_only(Tensor, lambda leaf: of_views.get(leaf, leaf), (args, kwargs)))


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def _owning(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Returns a predicate: True for modules that share no parameter or submodule with the rest of the model."""
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))

    def alone(unit: nn.Module) -> bool:
        inside = Counter(id(parameter) for _, parameter in unit.named_parameters(remove_duplicate=False))
        return all(names[key] == places[id(unit)] * count for key, count in inside.items())

    return alone


def _listed(model: nn.Module) -> list[str]:
    """For models without blocks, returns the most frequent class in their lists of layers, if it occurs more than once."""
    classes = Counter(
        type(child).__name__
        for module in model.modules()
        if isinstance(module, (nn.Sequential, nn.ModuleList))
        for child in module.children()
        if any(True for _ in child.parameters())
    )
    return [name for name, count in classes.most_common(1) if count > 1]

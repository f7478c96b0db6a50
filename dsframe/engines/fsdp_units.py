"""Which modules FSDP gathers as one: the model's blocks, or parts of them where a block is large compared with a rank's shard."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dsframe.cluster.exchange import all_gather_text
from dsframe.engine import Engine
from dsframe.errors import EngineError
from dsframe.model import switches
from dsframe.model.forward import call
from dsframe.tasks.meta import example, map_floats, meta_device, with_rows
from dsframe.tasks.task import Task

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def named(model: nn.Module, wanted: list[str]) -> list[nn.Module]:
    """Returns the modules that are gathered as one, innermost first: instances of the classes ``wanted``, or the model's blocks.

    What shares a parameter with another part of the model stays with the whole model: a parameter belongs to one unit.
    Raises EngineError, with the names that there are, for a class that the model does not have.
    """
    inner = [module for module in model.modules() if module is not model and any(True for _ in module.parameters())]
    inner = [
        module for module in inner if not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]  # they have no forward
    there = Counter(type(module).__name__ for module in inner)
    missing = [name for name in wanted if name not in there]
    if missing:
        known = ", ".join(f"{name} ({count})" for name, count in there.most_common())
        raise EngineError(f"fsdp.wrap: this model has no {', '.join(missing)}; it has {known}")
    block = switches.repeated(model)
    names = wanted or ([block] if block else _listed(model))
    alone = _owning(model)
    return [module for module in reversed(inner) if type(module).__name__ in names and alone(module)]


def _owning(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Returns a function that is true of modules that share no parameter with what is outside of them."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))

    def alone(unit: nn.Module) -> bool:
        inside = {id(module) for module in unit.modules()}
        return all(owners[id(parameter)] <= inside for parameter in unit.parameters())

    return alone


def _listed(model: nn.Module) -> list[str]:
    """Returns for models without blocks the most frequent class in their lists of layers, if it is there more than once."""
    classes = Counter(
        type(child).__name__
        for module in model.modules()
        if isinstance(module, (nn.Sequential, nn.ModuleList))
        for child in module.children()
        if any(True for _ in child.parameters())
    )
    return [name for name, count in classes.most_common(1) if count > 1]


def default_units(engine: Engine, model: nn.Module, ranks: int) -> list[nn.Module]:
    """**Collective.** Returns the units where the file names none: the blocks, or modules with parameters of their own.

    A block and its gradients, several times, stay in memory in addition to the shards (:meth:`Fsdp.splits`). A single
    module is a unit only if nothing but its own forward pass uses its parameters, which a run of the model without
    numbers shows.
    """
    blocks, fsdp = named(model, []), engine.plan.config.settings.fsdp
    whole = elements(model)
    largest = max(map(elements, blocks), default=whole)
    if not fsdp.splits(largest, whole, ranks, on_cpu=engine.plan.device.type == "cpu"):
        return blocks
    least = whole // (128 * ranks)
    owns_parameters = _owning(model)
    large = {
        name: module
        for name, module in model.named_modules()
        if module is not model and owns_parameters(module) and elements(module, recurse=False) >= least
    }
    usable = called_alone(model, engine.plan.task, engine.built.dtype)
    of_ranks = [set(json.loads(text)) for text in all_gather_text(engine, json.dumps(sorted(usable)))]
    parts = [module for name, module in large.items() if all(name in names for names in of_ranks)]
    inside = set(map(id, parts))

    def rest(block: nn.Module) -> int:
        return sum(elements(module, recurse=False) for module in block.modules() if id(module) not in inside)

    units = {id(module) for module in (*parts, *(block for block in blocks if rest(block) >= least))}
    return [module for module in reversed(list(model.modules())) if id(module) in units]


def elements(module: nn.Module, *, recurse: bool = True) -> int:
    """Returns how many numbers its parameters have."""
    return sum(parameter.numel() for parameter in module.parameters(recurse))


def called_alone(model: nn.Module, task: Task, dtype: torch.dtype) -> set[str]:
    """Returns the names of the modules that are called, and whose own parameters nothing uses while they are not running.

    A copy of the model without numbers takes one pass. Nothing is returned where it cannot: where the model decides by numbers,
    cannot be copied, or has forward methods that belong to other objects.
    """
    if any("forward" in vars(module) for module in model.modules()):
        return set()
    without: dict[int, Any] = {
        id(tensor): torch.empty_like(tensor, device="meta") for tensor in (*model.parameters(), *model.buffers())
    }
    for parameter in model.parameters():
        without[id(parameter)] = nn.Parameter(without[id(parameter)], requires_grad=parameter.requires_grad)
    try:
        twin = copy.deepcopy(model, without)
        for module in twin.modules():
            for name in _HOOKS:
                hooks = getattr(module, name)
                for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                    del hooks[key]
        inputs = map_floats(with_rows(example(task, prepared=True)[0], 2), lambda tensor: tensor.to(dtype))
        uses = _Uses(twin)
        with meta_device(), uses.watched():
            call(twin, inputs)
    except Exception:
        return set()
    return {name for name, module in twin.named_modules() if module in uses.called and module not in uses.elsewhere}


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("dsframe.")


class _Uses(TorchFunctionMode):
    """Which modules run, and whose parameters are touched while their module does not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.called: set[nn.Module] = set()
        self.elsewhere: set[nn.Module] = set()
        self._running: Counter[nn.Module] = Counter()
        self._model = model
        self._owners: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(module)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.elsewhere.update(m for m in self._owners.get(id(leaf), ()) if not self._running[m])
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches what runs inside."""
        for module in self._model.modules():
            module.register_forward_pre_hook(self._begins, prepend=True)
            module.register_forward_hook(self._ends)
        with self:
            yield

    def _begins(self, module: nn.Module, _: Any) -> None:
        self.called.add(module)
        self._running[module] += 1

    def _ends(self, module: nn.Module, *_: Any) -> None:
        self._running[module] -= 1

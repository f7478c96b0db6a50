"""Ways from a module's weights to the loss that a library does not see, such as a penalty that a hook keeps.

A library that shards weights gathers those of a module in the backward pass when the gradient of its outputs arrives. For other
ways torch would find no weights: it raises, or reads memory that is not there, and crashes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.cluster.exchange import all_gather_json
from dsframe.engine import Engine
from dsframe.engines.lent import root_of
from dsframe.errors import EngineError
from dsframe.values import tensors_of


class Escapes:
    """Finds the modules whose weights the first loss uses in such a way, and gathers them when a backward pass begins."""

    def __init__(
        self,
        engine: Engine,
        modules: Mapping[str, nn.Module],
        weights: Callable[[nn.Module], Iterable[Tensor]],
        gather: Callable[[nn.Module], Any],
        *,
        later: bool = False,
    ) -> None:
        """To be called when the library has added its hooks to ``modules``. ``weights``: a module's, as its forward pass
        uses them. ``gather``: **collective.** ``later``: refuses ways that a later loss is the first to take."""
        self._engine, self._modules, self._weights, self._gather = engine, modules, weights, gather
        self._handles = [module.register_forward_hook(self._note, with_kwargs=True) for module in modules.values()]
        self._later = later
        self._hooked: dict[nn.Module, set[Any]] = defaultdict(set)
        """Autograd nodes of a module's outputs."""
        self._inputs: dict[Any, list[Any]] = {}
        """For each of those, the nodes of the module's inputs."""
        self._found: list[nn.Module] | None = None

    def _note(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        inputs = [leaf.grad_fn for leaf in tensors_of((args, kwargs)) if leaf.grad_fn is not None]
        for leaf in tensors_of(outputs):
            for node in {leaf.grad_fn, root_of(leaf).grad_fn} - {None}:
                self._hooked[module].add(node)
                self._inputs[node] = inputs

    def gather(self, loss: Any) -> None:
        """**Collective** for the first loss. To be called before each backward pass. Raises EngineError for a later loss."""
        if self._found is None:
            names = self._names(loss.grad_fn)
            self._found = [
                self._modules[name] for name in sorted({*names}.union(*all_gather_json(self._engine, names)))
            ]
            self._owners = {
                id(weight): name
                for name, module in self._modules.items()
                for weight in self._weights(module)
                if module not in self._found
            }
            for handle in self._handles if not self._later else ():
                handle.remove()
        elif self._later:
            self._refuse_others(loss.grad_fn)
        self._hooked.clear()
        self._inputs.clear()
        if found := self._found:
            loss.register_hook(lambda _: [self._gather(module) for module in found] and None)

    def _refuse_others(self, last: Any) -> None:
        """Raises EngineError if a way leads from ``last`` into a module that is not known, by other nodes than its outputs."""
        seen, ahead = set[Any](), [last]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            name = self._owners.get(id(getattr(node, "variable", None)))
            # A module that writes to its inputs is part of their history: ask for the whole graph.
            if name is not None and name in self._names(last):
                raise EngineError(
                    f"{name}: from this step on the loss depends on its weights by a tensor that has left it by another way than "
                    f"outputs and attributes (in a hook, a global, the task), and {self._engine.description} does not gather them "
                    "for that: return it, or compute it from the first step on, times 0"
                )
            ahead += self._inputs[node] if node in self._inputs else (before for before, _ in node.next_functions)

    def _names(self, last: Any) -> list[str]:
        """Returns the names of modules from whose weights a way leads to ``last``, a node, without their outputs."""
        after, of_weights = defaultdict[Any, list[Any]](list), dict[int, Any]()
        ahead = [last]
        while ahead:
            node = ahead.pop()
            if (weight := getattr(node, "variable", None)) is not None:
                of_weights[id(weight)] = node
            for before, _ in node.next_functions:
                if before is not None:
                    if before not in after:
                        ahead.append(before)
                    after[before].append(node)
        names = []
        for name, module in self._modules.items():
            seen = set(self._hooked[module])
            ahead = [of_weights[id(weight)] for weight in self._weights(module) if id(weight) in of_weights]
            while ahead and last not in seen:
                node = ahead.pop()
                if node not in seen:
                    seen.add(node)
                    ahead += after[node]
            if last in seen - self._hooked[module]:
                names.append(name)
        return names

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
from dsframe.values import tensors_of


class Escapes:
    """Finds the modules whose weights the first loss uses in such a way, and gathers them when a backward pass begins."""

    def __init__(
        self,
        engine: Engine,
        modules: Mapping[str, nn.Module],
        weights: Callable[[nn.Module], Iterable[Tensor]],
        gather: Callable[[nn.Module], Any],
    ) -> None:
        """To be called when the library has added its hooks to ``modules``. ``weights``: a module's, as its forward pass
        uses them. ``gather``: **collective.**"""
        self._engine, self._modules, self._weights, self._gather = engine, modules, weights, gather
        self._handles = [module.register_forward_hook(self._note) for module in modules.values()]
        self._hooked: dict[nn.Module, set[Any]] = defaultdict(set)
        """Autograd nodes of a module's outputs."""
        self._found: list[nn.Module] = []

    def _note(self, module: nn.Module, _: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            nodes = (node for leaf in tensors_of(outputs) for node in (leaf.grad_fn, root_of(leaf).grad_fn) if node)
            self._hooked[module].update(nodes)

    def gather(self, loss: Any) -> None:
        """**Collective** for the first loss. To be called before each backward pass."""
        if self._handles:
            names = self._names(loss.grad_fn)
            self._found = [
                self._modules[name] for name in sorted({*names}.union(*all_gather_json(self._engine, names)))
            ]
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._hooked.clear()
        if self._found:
            loss.register_hook(lambda _: [self._gather(module) for module in self._found] and None)

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

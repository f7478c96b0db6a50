"""torch's L-BFGS: the optimizer that evaluates a step's batch several times, and whose state is not kept by parameter.

torch keeps one entry for all parameters, whose vectors run over all of them (torch 2.13, ``optim/lbfgs.py``). Checkpoints have
state by parameter, so each vector is cut at the parameters, and numbers stand with every one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_VECTORS = ("d", "prev_flat_grad")
_HISTORY = ("old_dirs", "old_stps")
_NUMBERS = ("func_evals", "n_iter", "t", "H_diag", "prev_loss")
_WHOLE_NUMBERS = frozenset({"func_evals", "n_iter"})


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a step of it evaluates the loss again."""
    return isinstance(optimizer, torch.optim.LBFGS)


class ByParameter:
    """L-BFGS with state as other optimizers keep it: tensors in the shape of each parameter, and numbers.

    Vectors of the history are named ``old_dirs.0`` (the oldest) and so on; ``ro.0`` belongs to the first of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self._parameters: list[Tensor] = optimizer.param_groups[0]["params"]
        self._held: dict[str, Any] = optimizer.state[self._parameters[0]]
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        """Parameter -> its part: views of the optimizer's own vectors."""
        numbers = {name: float(value) for name, value in self._numbers()}
        for parameter in self._parameters if self._held else ():
            self.state[parameter] = dict(numbers)
        for name, vector in self._flat():
            parts = torch.split(vector, [parameter.numel() for parameter in self._parameters])
            for parameter, part in zip(self._parameters, parts, strict=True):
                self.state[parameter][name] = part.view(parameter.shape)

    def put_back(self) -> None:
        """Makes the optimizer's entry from the parts, as loading has left them."""
        self._held.clear()
        parts = [self.state.get(parameter, {}) for parameter in self._parameters]
        for name in parts[0]:
            key, _, position = name.partition(".")
            if key in (*_VECTORS, *_HISTORY):
                value: Any = torch.cat([part[name].reshape(-1) for part in parts])
            else:
                value = int(parts[0][name]) if key in _WHOLE_NUMBERS else float(parts[0][name])
            if position:
                self._held.setdefault(key, []).append((int(position), value))
            else:
                self._held[key] = value
        if "d" in self._held:
            for key in (*_HISTORY, "ro"):
                self._held[key] = [value for _, value in sorted(self._held.get(key, []), key=lambda pair: pair[0])]

    def _flat(self) -> Iterator[tuple[str, Tensor]]:
        for name in _VECTORS:
            if isinstance(self._held.get(name), Tensor):
                yield name, self._held[name]
        for name in _HISTORY:
            for position, vector in enumerate(self._held.get(name) or ()):
                yield f"{name}.{position}", vector

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        for name in _NUMBERS:
            if self._held.get(name) is not None:
                yield name, self._held[name]
        for position, value in enumerate(self._held.get("ro") or ()):
            yield f"ro.{position}", value


def by_parameter(optimizer: torch.optim.Optimizer) -> Any:
    """Returns the ``optimizer`` itself, or L-BFGS as :class:`ByParameter`."""
    return ByParameter(optimizer) if needs_closure(optimizer) else optimizer

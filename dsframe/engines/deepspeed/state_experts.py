"""State of experts that AutoEP has distributed over ranks: joined for checkpoints, and split again.

AutoEP replaces a mixture-of-experts layer: ``experts.w1``, ``w2`` and ``w3`` are this rank's experts only, and the
router is ``router.gate``. transformers stacks all experts: ``experts.gate_up_proj`` with gates in the first half of
each expert's rows and ups in the second, ``experts.down_proj``, and ``gate``. Checkpoints have only the latter names,
so a training can continue with another number of expert-parallel ranks, or with none. Source: deepspeed 0.19.8,
``module_inject/auto_ep_layer.py``, ``moe/ep_repack.py`` (_repack_fused_3d).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsframe.cluster.process_group import gathered
from dsframe.engines.deepspeed.state_tensor import refuse_unlike
from dsframe.model.state import EngineState, ParameterState, SavedState, SavedView, Shapes, narrowed


@dataclass(frozen=True)
class Part:
    """Position of an AutoEP parameter in one of the model's parameters."""

    whole: str
    """Name of the parameter in the model and in checkpoints."""
    shape: tuple[int, ...]
    """Whole shape: ``[experts, rows, columns]``; of a router ``[experts, columns]``."""
    local_shape: tuple[int, ...]
    """This rank's shape: ``[its experts, its rows, columns]``; of a router the whole shape."""
    expert: int = 0
    """The first of this rank's experts."""
    row: int = 0
    """The first of the rows."""

    @property
    def spread(self) -> bool:
        """True if ranks have different experts; a router is the same on all."""
        return len(self.shape) == 3

    def pick(self, experts: Tensor) -> Tensor:
        """Returns this parameter's rows of this rank's ``experts``, ``[experts, rows, columns]``."""
        return experts[:, self.row : self.row + self.local_shape[1]].contiguous()

    def put(self, whole: Tensor, of_ranks: Sequence[Tensor]) -> None:
        """Writes each rank's experts, in the order of ranks, to ``whole``."""
        whole[:, self.row : self.row + self.local_shape[1]] = torch.cat(list(of_ranks))


def parts(model: nn.Module) -> dict[str, Part]:
    """Returns every parameter of ``model`` that AutoEP has made, by its name there."""
    by_name: dict[str, Part] = {}
    module: Any
    for prefix, module in model.named_modules():
        if not getattr(module, "_is_autoep_layer", False):
            continue
        shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}
        _, rows, columns = shapes["experts.w1"]
        count, first = module.num_experts, module.ep_rank * module.num_local_experts
        router, both, down = (count, columns), (count, 2 * rows, columns), (count, columns, rows)
        made = {
            "router.gate.weight": Part("gate.weight", router, router),
            "experts.w1": Part("experts.gate_up_proj", both, shapes["experts.w1"], first),
            "experts.w3": Part("experts.gate_up_proj", both, shapes["experts.w3"], first, rows),
            "experts.w2": Part("experts.down_proj", down, shapes["experts.w2"], first),
        }
        assert made.keys() == shapes.keys(), f"{prefix}: {sorted(shapes)}"
        by_name |= {
            f"{prefix}.{name}": dataclasses.replace(part, whole=f"{prefix}.{part.whole}") for name, part in made.items()
        }
    return by_name


def whole(state: EngineState, made: Mapping[str, Part], group: dist.ProcessGroup) -> EngineState:
    """**Collective** to read to its end, over ``group``, which shares the experts: ``state`` with the model's names.

    In memory at a time are one whole parameter, and those of which not all parts have arrived.
    """
    # AutoEP's layers have their router under a second name.
    further = {name: kept for name, kept in state.aliases.items() if kept not in made}
    return dataclasses.replace(state, aliases=further, parameters=_joined(state, made, group))


def _joined(state: EngineState, made: Mapping[str, Part], group: dist.ProcessGroup) -> Iterator[ParameterState]:
    missing = Counter(part.whole for part in made.values())
    begun: dict[str, ParameterState] = {}
    for parameter in state.parameters:
        part = made.get(parameter.name)
        if part is None:
            yield parameter
        elif not part.spread:
            yield dataclasses.replace(parameter, name=part.whole)
        else:
            refuse_unlike(parameter, part.whole, "expert_parallel")
            if part.whole not in begun:
                empty = {key: moment.new_empty(part.shape) for key, moment in parameter.moments.items()}
                weight = parameter.weight.new_empty(part.shape)
                begun[part.whole] = ParameterState(part.whole, weight, empty, dict(parameter.scalars))
            complete = begun[part.whole]
            _gather(parameter.weight, complete.weight, part, group)
            for key, moment in parameter.moments.items():
                _gather(moment, complete.moments[key], part, group)
            missing[part.whole] -= 1
            if not missing[part.whole]:
                yield begun.pop(part.whole)


def _gather(local: Tensor, into: Tensor, part: Part, group: dist.ProcessGroup) -> None:
    part.put(into, gathered(local.contiguous(), group))


class Experts(SavedView):
    """A saved state, with the model's names, as one rank's AutoEP layers need it."""

    def __init__(self, saved: SavedState, made: Mapping[str, Part]) -> None:
        super().__init__(saved)
        self._made, self._wholes = made, {part.whole for part in made.values()}

    @property
    def shapes(self) -> Shapes:
        """Shapes of this rank's parameters; if the saved model differs, the saved shape, so that it is detected."""
        saved = self._saved.shapes
        shapes = {name: shape for name, shape in saved.items() if name not in self._wholes}
        for name, part in self._made.items():
            if (kept := saved.get(part.whole)) is not None:
                shapes[name] = part.local_shape if tuple(kept) == part.shape else kept
        return shapes

    def parameter(self, name: str) -> ParameterState:
        """Returns one of this rank's parameters; reads only this rank's experts."""
        part = self._made.get(name)
        if part is None:
            return self._saved.parameter(name)
        if not part.spread:
            return dataclasses.replace(self._saved.parameter(part.whole), name=name)
        each, count = math.prod(part.shape[1:]), part.local_shape[0]
        stored = self._saved.part(part.whole, part.expert * each, count * each)
        moments = {key: part.pick(moment.view(count, *part.shape[1:])) for key, moment in stored.moments.items()}
        return ParameterState(name, part.pick(stored.weight.view(count, *part.shape[1:])), moments, stored.scalars)

    def part(self, name: str, first: int, size: int) -> ParameterState:
        """Returns a range of one of this rank's parameters."""
        if name not in self._made:
            return self._saved.part(name, first, size)
        return narrowed(self.parameter(name), first, size)

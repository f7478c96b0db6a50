"""The parts of a model, for a run's first lines: its children, with the numbers of their parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dsframe.values import elements


@dataclass(frozen=True)
class Part:
    """A child of a model, or what the model itself has beside its children."""

    name: str
    kind: str
    """Its class."""
    parameters: int
    """Elements that no part before it has."""
    trained: int


def parts_of(model: nn.Module) -> tuple[Part, ...]:
    """Returns the parts of a model that is not sharded yet. A shared parameter counts where it comes first."""
    counted = set[int]()
    parts = []
    for name, module in [*model.named_children(), ("(itself)", model)]:
        fresh = [parameter for parameter in module.parameters() if id(parameter) not in counted]
        counted.update(map(id, fresh))
        trained = sum(parameter.numel() for parameter in fresh if parameter.requires_grad)
        size = elements(fresh)
        if size:
            parts.append(Part(name, type(module).__name__, size, trained))
    return tuple(parts)

"""Lists the children of a model with the numbers of their parameters, for a run's first lines."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dsframe.values import elements


@dataclass(frozen=True)
class Part:
    """A child of a model, or the model's own parameters outside its children."""

    name: str
    kind: str
    """Its class."""
    parameters: int
    """Elements that no earlier part has."""
    trained: int


def parts_of(model: nn.Module) -> tuple[Part, ...]:
    """Returns the parts of an unsharded model. A shared parameter counts in its first part."""
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

"""A model as a list of layers: each can be built by itself, on the process that needs it, and is the same everywhere.

Every layer that is given as a function is built under a seed of its own, so that a process which holds only some layers draws
the same weights for them as one that holds all. A layer may also be a ready module: then every process builds it, with whatever
else the task's ``layers()`` builds, before those that do not need it drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dsframe.errors import TaskError
from dsframe.host import generators


@dataclass(frozen=True)
class Tied:
    """A layer that computes with the weight of an earlier one: ``outputs = function(inputs, weight)``.

    ``Tied(0, torch.nn.functional.linear)`` scores each token by its own embedding, the weight of layer 0.
    """

    layer: int
    """Index of the layer that owns the weight, its only parameter."""
    function: Callable[[Tensor, Tensor], Tensor]
    weight: str = "weight"
    """The parameter's name in that layer."""


Layer = nn.Module | Callable[[], nn.Module] | Tied
"""A function without arguments that makes the layer (a class, ``functools.partial(Block, width)``), a module, or a tie."""


class TiedLayer(nn.Module):
    """A :class:`Tied` layer if the complete model is on one process. It holds the Parameter that it shares."""

    def __init__(self, tie: Tied, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self._function = weight, tie.function

    def forward(self, inputs: Tensor) -> Tensor:
        return self._function(inputs, self.weight)


def make(layer: Layer, index: int, seed: int) -> nn.Module:
    """Layer ``index`` by itself, drawn from its own seed. Raises TaskError for what makes no module, and for a tie."""
    if isinstance(layer, nn.Module):
        return layer
    generators.seed(seed * 1_000_003 + index)
    made = layer() if callable(layer) else layer
    if not isinstance(made, nn.Module):
        raise TaskError(
            f"layer {index} of layers() is a {type(made).__name__}, neither a module nor a function that makes one"
        )
    return made


def tied_weight(layers: Sequence[Layer], index: int, owner: nn.Module) -> nn.Parameter:
    """The weight that the tie at ``index`` shares, out of the layer that owns it. Raises TaskError where there is none."""
    tie = layers[index]
    assert isinstance(tie, Tied)
    names = [name for name, _ in owner.named_parameters()]
    if names != [tie.weight]:
        raise TaskError(
            f"layer {index} is tied to the {tie.weight} of layer {tie.layer}, whose parameters are {', '.join(names) or 'none'}; "
            "make what is shared a layer of its own, with this one parameter"
        )
    return owner.get_parameter(tie.weight)


def check_ties(layers: Sequence[Layer]) -> None:
    """Raises TaskError where a tie points at nothing that can own a weight."""
    for index, tie in enumerate(layers):
        if isinstance(tie, Tied) and not (0 <= tie.layer < index and not isinstance(layers[tie.layer], Tied)):
            raise TaskError(f"layer {index} is tied to layer {tie.layer}; it has to be an earlier one with a weight")


def ready(layers: Sequence[Layer]) -> list[nn.Module]:
    """Returns layers that are modules already, and ties, as modules. Raises TaskError for one that is to be made."""

    def there(layer: Layer, index: int) -> nn.Module:
        if isinstance(layer, nn.Module):
            return layer
        raise TaskError(f"layer {index} of cut() is no module; cut() gives the parts of a model that is there")

    return _with_ties(layers, there)


def assemble(layers: Sequence[Layer], seed: int) -> nn.Sequential:
    """The whole model: parameter names are ``INDEX.rest``. Raises TaskError as :func:`make` does."""
    return nn.Sequential(*_with_ties(layers, lambda layer, index: make(layer, index, seed)))


def _with_ties(layers: Sequence[Layer], module: Callable[[Layer, int], nn.Module]) -> list[nn.Module]:
    """``layers`` as modules: ties by themselves, the others by ``module``."""
    check_ties(layers)
    modules: list[nn.Module] = []
    for index, layer in enumerate(layers):
        if isinstance(layer, Tied):
            modules.append(TiedLayer(layer, tied_weight(layers, index, modules[layer.layer])))
        else:
            modules.append(module(layer, index))
    return modules

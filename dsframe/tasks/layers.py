"""A model as a list of layers, each of which can be built alone on the process that needs it, with the same weights
everywhere.

A layer given as a function has its own seed, so a process that builds only some layers draws the same weights for them.
A layer may also be an existing module: then every process builds it, with everything else in the task's ``layers()``,
and drops it if it does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dsframe.errors import TaskError
from dsframe.host import generators


@dataclass(frozen=True)
class Tied:
    """A layer that uses the weight of an earlier one: ``outputs = function(inputs, weight)``.

    With ``Tied(0, torch.nn.functional.linear)`` the output layer uses the embeddings, the weight of layer 0.
    """

    layer: int
    """Index of the layer that owns the weight, its only parameter."""
    function: Callable[[Tensor, Tensor], Tensor]
    weight: str = "weight"
    """The parameter's name in that layer."""


Layer = nn.Module | Callable[[], nn.Module] | Tied
"""A function that creates the layer (a class, ``functools.partial(Block, width)``), a module, or a tie."""


class TiedLayer(nn.Module):
    """A :class:`Tied` layer if the complete model is on one process. It holds the shared Parameter."""

    def __init__(self, tie: Tied, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self._function = weight, tie.function

    def forward(self, inputs: Tensor) -> Tensor:
        return self._function(inputs, self.weight)


def make(layer: Layer, index: int, seed: int) -> nn.Module:
    """Returns layer ``index``, drawn from its own seed. Raises TaskError for a tie, or if it is no module."""
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
    """Returns the weight of the tie at ``index``, from the layer that owns it. Raises TaskError if none."""
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
    """Raises TaskError if a tie does not refer to an earlier layer that can own a weight."""
    for index, tie in enumerate(layers):
        if isinstance(tie, Tied) and not (0 <= tie.layer < index and not isinstance(layers[tie.layer], Tied)):
            raise TaskError(f"layer {index} is tied to layer {tie.layer}; it has to be an earlier one with a weight")


def ready(layers: Sequence[Layer]) -> list[nn.Module]:
    """Returns existing modules, and ties, as modules. Raises TaskError for a function."""

    def there(layer: Layer, index: int) -> nn.Module:
        if isinstance(layer, nn.Module):
            return layer
        raise TaskError(f"layer {index} of cut() is not a module; cut() gives the parts of a model that is there")

    return _with_ties(layers, there)


def assemble(layers: Sequence[Layer], seed: int) -> nn.Sequential:
    """Returns the complete model; parameter names are ``INDEX.rest``. Raises TaskError like :func:`make`."""
    return nn.Sequential(*_with_ties(layers, lambda layer, index: make(layer, index, seed)))


def _with_ties(layers: Sequence[Layer], module: Callable[[Layer, int], nn.Module]) -> list[nn.Module]:
    """Returns ``layers`` as modules, of which ``module`` creates all but the ties."""
    check_ties(layers)
    modules: list[nn.Module] = []
    for index, layer in enumerate(layers):
        if isinstance(layer, Tied):
            modules.append(TiedLayer(layer, tied_weight(layers, index, modules[layer.layer])))
        else:
            modules.append(module(layer, index))
    return modules

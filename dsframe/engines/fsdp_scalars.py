"""Parameters without dimensions, such as CLIP's temperature: FSDP shards them with shape [1], the model sees []."""

from __future__ import annotations

import operator
import types
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def add_dimension(model: nn.Module) -> set[str]:
    """Gives parameters of shape [] the shape [1]; their module still reads a scalar. Returns their names."""
    names = {name for name, parameter in model.named_parameters() if not parameter.ndim}
    scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
    for module in list(model.modules()) if scalars else ():
        held = [name for name, parameter in module._parameters.items() if parameter in scalars]
        if held:
            cls = type(module)
            members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            members |= {name: _reader(name) for name in held}
            module.__class__ = types.new_class(cls.__name__, (cls,), exec_body=operator.methodcaller("update", members))
    for parameter in scalars:
        parameter.data = parameter.data.view(1)
    return names


def _reader(name: str) -> Any:
    def read(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        # For a shard return the parameter itself: it has no scalar value.
        return parameter if parameter is None or isinstance(parameter, DTensor) else parameter.view(())

    return property(read)

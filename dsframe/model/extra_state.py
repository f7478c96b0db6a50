"""What modules keep by ``get_extra_state()``: saved among the buffers, by the names of a ``state_dict``, as bytes of ``torch.save``
that ``torch.load(weights_only=True)`` reads: a checkpoint runs no code."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.errors import TaskError
from dsframe.values import Tensors

KEY = "_extra_state"  # torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def is_extra(name: str) -> bool:
    """True of a name that :func:`pack` gives."""
    return name.rpartition(".")[2] == KEY


def pack(model: nn.Module) -> Tensors:
    """The extra state of each module that has one, as uint8, by name. Raises TaskError for what ``unpack`` would not read."""
    return {name: _bytes(module) for name, module in keepers(model).items()}


def unpack(packed: Tensor) -> Any:
    """What ``get_extra_state()`` returned, on the CPU."""
    return torch.load(io.BytesIO(packed.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)


def unpacked(name: str, tensor: Tensor) -> Any:
    """A value of a ``state_dict``: ``tensor`` itself where ``name`` is none of an extra state."""
    return unpack(tensor) if is_extra(name) else tensor


def load(model: nn.Module, packed: Tensors) -> None:
    """Calls ``set_extra_state()`` of each module that ``packed`` names."""
    for name, module in keepers(model).items() if packed else ():
        if name in packed:
            module.set_extra_state(unpack(packed[name]))


def keepers(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Module]:
    """The modules that have an extra state, by its name; without ``remove_duplicate`` under each of their names."""
    return {
        f"{prefix}.{KEY}".removeprefix("."): module
        for prefix, module in model.named_modules(remove_duplicate=remove_duplicate)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _bytes(module: nn.Module) -> Tensor:
    if type(module).set_extra_state is nn.Module.set_extra_state:
        raise TaskError(
            f"{type(module).__name__} has get_extra_state() and no set_extra_state(), so a resume would lose the state"
        )
    file = io.BytesIO()
    try:
        torch.save(module.get_extra_state(), file)
        packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        unpack(packed)
    except Exception as error:  # whatever the user's class raises, pickle, or torch for a class that it does not know
        raise TaskError(
            f"{type(module).__name__}.get_extra_state() cannot be saved ({type(error).__name__}): let it return tensors, numbers, "
            "texts, and lists and dicts of them"
        ) from None
    return packed

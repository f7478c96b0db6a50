"""Saves the ``get_extra_state()`` of modules with the buffers, by the names of a ``state_dict``. The bytes are of
``torch.save``, readable by ``torch.load(weights_only=True)``, because a checkpoint must not run code."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.errors import TaskError
from dsframe.values import Tensors

KEY = "_extra_state"  # torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def is_extra(name: str) -> bool:
    """Returns True for a name from :func:`pack`."""
    return name.rpartition(".")[2] == KEY


def pack(model: nn.Module) -> Tensors:
    """Returns the modules' extra states, uint8, by name. Raises TaskError if ``unpack`` could not read one."""
    return {name: _bytes(module) for name, module in keepers(model).items()}


def unpack(packed: Tensor) -> Any:
    """Returns the value of ``get_extra_state()``, on the CPU."""
    return torch.load(io.BytesIO(packed.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)


def unpacked(name: str, tensor: Tensor) -> Any:
    """Returns a value of a ``state_dict``: unpacked if ``name`` is an extra state, else ``tensor``."""
    return unpack(tensor) if is_extra(name) else tensor


def load(model: nn.Module, packed: Tensors) -> None:
    """Calls ``set_extra_state()`` of each module in ``packed``."""
    for name, module in keepers(model).items() if packed else ():
        if name in packed:
            module.set_extra_state(unpack(packed[name]))


def keepers(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Module]:
    """Returns the modules with an extra state, by its name; without ``remove_duplicate`` under each of their names."""
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
    except Exception as error:  # any error of the user's class or pickle, or torch's for an unknown class
        raise TaskError(
            f"{type(module).__name__}.get_extra_state() cannot be saved ({type(error).__name__}): let it return tensors, numbers, "
            "texts, and lists and dicts of them"
        ) from None
    return packed

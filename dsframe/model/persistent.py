"""Defines which parameters, buffers and extra states checkpoints contain, by name, and restores buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.errors import CheckpointError
from dsframe.model import extra_state
from dsframe.model.state import SavedState, Shapes
from dsframe.values import Tensors


def persistent_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Tensors:
    """Returns the buffers in the model's ``state_dict``, by name: BatchNorm's statistics are included, causal masks are
    not. Sparse ones, such as a graph's edges, are excluded: checkpoints hold dense tensors, and ``model()`` creates
    sparse ones again. Without ``remove_duplicate`` a buffer has each of its names."""
    buffers = {}
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=remove_duplicate):
            if name not in module._non_persistent_buffers_set and buffer.layout == torch.strided:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


def saved_buffers(model: nn.Module) -> Tensors:
    """Returns the persistent buffers, and the extra state of modules (``extra_state``)."""
    return persistent_buffers(model) | extra_state.pack(model)


def shapes_of(buffers: Tensors, resized: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Returns shapes for :func:`compare`, () for extra states and ``resized`` buffers, whose sizes change."""
    return {
        name: () if name in resized or extra_state.is_extra(name) else tuple(buffer.shape)
        for name, buffer in buffers.items()
    }


_LEFT_OUT = "_dsframe_left_out"


def leave_out(model: nn.Module, names: Iterable[str]) -> None:
    """Excludes these parameters from checkpoints: they are frozen and built again at each start."""
    setattr(model, _LEFT_OUT, frozenset(names))


def left_out(model: nn.Module) -> frozenset[str]:
    """Returns the names given to :func:`leave_out`."""
    excluded: frozenset[str] = getattr(model, _LEFT_OUT, frozenset())
    return excluded


def saved_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Returns ``model.named_parameters()`` without those that checkpoints exclude."""
    without = left_out(model)
    return ((name, parameter) for name, parameter in model.named_parameters() if name not in without)


def aliases(model: nn.Module) -> dict[str, str]:
    """Returns the further names of tied parameters, and of buffers and extra states of shared modules."""
    first: dict[int, str] = {}
    every: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    every |= persistent_buffers(model, remove_duplicate=False) | extra_state.keepers(model, remove_duplicate=False)
    saved, without = persistent_buffers(model), left_out(model)
    further = {name: first[id(held)] for name, held in every.items() if first.setdefault(id(held), name) != name}
    return {name: kept for name, kept in further.items() if name not in saved and kept not in without}


@torch.no_grad()
def load_buffers(model: nn.Module, saved: SavedState) -> None:
    """Loads the saved buffers in place, and extra states. Raises CheckpointError if names or shapes differ."""
    kept = saved.buffers()
    make_room(model, kept, saved.resized)
    compare("buffer", shapes_of(saved_buffers(model)), shapes_of(kept))
    for name, buffer in persistent_buffers(model).items():
        buffer.copy_(kept[name])
    extra_state.load(model, kept)


@torch.no_grad()
def put(content: Tensor, buffer: Tensor) -> None:
    """Copies in place. Also resizes the ``buffer``, if a forward pass changed its size."""
    if buffer.shape != content.shape:
        buffer.data = torch.empty_like(content, dtype=buffer.dtype, device=buffer.device)
    buffer.copy_(content)


def make_room(model: nn.Module, saved: Tensors, resized: Collection[str]) -> None:
    """Creates buffers that were None before a forward pass (``register_buffer("mean", None)``), and resizes those that
    training has ``resized``, or whose module loads itself, as in ``torch.ao.quantization``."""
    modules = dict(model.named_modules())
    for name, content in saved.items():
        path, _, key = name.rpartition(".")
        if (module := modules.get(path)) is None or key not in module._buffers:
            continue
        now = module._buffers[key]
        loads_itself = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
        if now is None:
            device = next((weight.device for weight in module.parameters()), content.device)
            module._buffers[key] = content.to(device, copy=True)
        elif now.shape != content.shape and (name in resized or loads_itself):
            module._buffers[key] = torch.empty(content.shape, dtype=now.dtype, device=now.device)


def compare(what: str, expected: Shapes, saved: Shapes) -> None:
    """Raises CheckpointError with the first few differences if names or shapes differ."""
    differences = [f"{name} is new" for name in expected if name not in saved]
    made = what == "buffer" and any(name not in expected for name in saved)
    differences += [f"{name} is gone" for name in saved if name not in expected]
    differences += [
        f"{name} has shape {list(expected[name])}, saved {list(saved[name])}"
        for name in expected
        if name in saved and tuple(expected[name]) != tuple(saved[name])
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        remedy = ". A buffer that forward makes is to be registered in __init__, or with persistent=False" * made
        text = f"({what}s differ): {'; '.join(differences[:3])}{more}{remedy}"
        raise CheckpointError(f"the checkpoint belongs to another model {text}")

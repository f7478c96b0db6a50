"""Outputs of FSDP's units: those that are weights, and those that are views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dsframe.engines.lent import root_of
from dsframe.model import output_classes
from dsframe.values import tensors_of


def add_hooks(units: Iterable[nn.Module], *, sharded: bool) -> None:
    """To be called before ``fully_shard``. ``sharded``: FSDP gathers weights unit by unit."""
    for unit in units:
        unit.register_forward_hook(_copy_weights)
        if sharded:
            unit.register_forward_hook(_hook_views, with_kwargs=True)


def _copy_weights(module: nn.Module, _: Any, outputs: Any) -> Any:
    """Copies outputs that are weights, whose memory FSDP frees."""
    output_classes.register(outputs)
    leaves = tensors_of(outputs)
    weights = set(_memory(module.parameters()).values()) if any(leaf.grad_fn is None for leaf in leaves) else ()
    own = {leaf for leaf, memory in _memory(leaves).items() if memory in weights}
    return tree_map_only(Tensor, lambda leaf: leaf.clone() if leaf in own else leaf, outputs) if own else None


def _memory(tensors: Iterable[Tensor]) -> dict[Tensor, int]:
    """Returns where the memory of dense tensors begins, without sharded ones."""
    dense = (one for one in tensors if one.layout == torch.strided and not isinstance(one, DTensor))
    return {one: one.untyped_storage().data_ptr() for one in dense}


def _hook_views(module: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    """If a caller writes to an output that is a view (``h += x``), torch gives it a new autograd history, which
    loses FSDP's hook (2.13, ``_fsdp_state.py``): what it is a view of gets that hook, too."""
    leaves, state = tensors_of(outputs), module._get_fsdp_state()
    recomputes = state._training_state is TrainingState.PRE_BACKWARD  # FSDP adds no hooks then
    if torch.is_grad_enabled() and not recomputes:
        for root in {root_of(leaf) for leaf in leaves}.difference(leaves, tensors_of((args, kwargs))):
            cast(Any, root).register_hook(state._pre_backward)


def gathered_weights(unit: Any) -> Iterator[Tensor]:
    """Yields a unit's weights, as its forward pass uses them."""
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        yield from (one._unsharded_param for one in group.fsdp_params if hasattr(one, "_unsharded_param"))


def gather(unit: Any) -> None:
    """**Collective.** Gathers a unit's weights in the backward pass, before the gradient of its outputs arrives."""
    unit._get_fsdp_state()._pre_backward(None)

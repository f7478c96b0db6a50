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


def copy_weights(module: nn.Module, _: Any, outputs: Any) -> Any:
    """A forward hook: copies outputs that are weights, whose memory FSDP frees."""
    output_classes.register(outputs)
    leaves = tensors_of(outputs)
    weights = set(_memory(module.parameters()).values()) if any(leaf.grad_fn is None for leaf in leaves) else ()
    own = {leaf for leaf, memory in _memory(leaves).items() if memory in weights}
    return tree_map_only(Tensor, lambda leaf: leaf.clone() if leaf in own else leaf, outputs) if own else None


def _memory(tensors: Iterable[Tensor]) -> dict[Tensor, int]:
    """Returns where the memory of dense tensors begins, without sharded ones."""
    dense = (one for one in tensors if one.layout == torch.strided and not isinstance(one, DTensor))
    return {one: one.untyped_storage().data_ptr() for one in dense}


def hook_views(module: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    """A forward hook. If a caller writes to an output that is a view (``h += x``), torch gives it a new autograd history, which
    loses FSDP's hook (2.13, ``_fsdp_state.py``): what it is a view of gets that hook, too."""
    leaves, state = tensors_of(outputs), module._get_fsdp_state()
    if (
        torch.is_grad_enabled() and state._training_state is not TrainingState.PRE_BACKWARD
    ):  # recomputed: FSDP adds none
        for root in {root_of(leaf) for leaf in leaves}.difference(leaves, tensors_of((args, kwargs))):
            cast(Any, root).register_hook(state._pre_backward)


def gathered_weights(unit: Any) -> Iterator[Tensor]:
    """Yields a unit's weights, as its forward pass uses them."""
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        yield from (one._unsharded_param for one in group.fsdp_params if hasattr(one, "_unsharded_param"))

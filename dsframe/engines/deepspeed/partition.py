"""Inputs of recomputed blocks, shared out among the ranks that hold shares of the same layers.

All of these ranks read the same samples, and the sums between cut layers make what goes from block to block equal on all of them:
each keeps a part until the block is computed again (Rajbhandari et al. 2020, arXiv 1910.02054, section 6.1: P_a).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsframe.errors import EngineError
from dsframe.model import switches

_KEY = "activation_checkpointing.partition_activations"


def share_out(model: nn.Module, group: dist.ProcessGroup, *, to_host: bool) -> None:
    """Each rank of ``group`` keeps only its part of what the recomputed blocks of ``model`` keep.

    From then on their forward passes (the first of each block) and backward passes are **collective** over the group.
    ``to_host``: the parts wait in the host's memory. Raises EngineError, in the first step, where a block's inputs are not
    the same on all ranks.
    """
    for name, block in model.named_modules():
        if switches.is_recomputed(block):
            parts = Parts(name, group, to_host=to_host)
            switches.keep(block, partial(torch.autograd.graph.saved_tensors_hooks, parts.pack, parts.unpack))


Kept = tuple[Tensor, torch.Size | None, torch.device]
"""A part, and the shape and device of its whole; without a shape a whole."""


class Parts:
    """What one block keeps of its inputs."""

    def __init__(self, name: str, group: dist.ProcessGroup, *, to_host: bool) -> None:
        """``name``: of the block, for an error's text."""
        self._name, self._group, self._to_host = name, group, to_host
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._compared = False

    def pack(self, tensor: Tensor) -> Kept:
        """This rank's part. Masks and the like, which are every block's, and what is not laid out in one piece stay whole."""
        if tensor.grad_fn is None or not tensor.is_contiguous() or tensor.numel() < self._size:
            return tensor, None, tensor.device
        flat = tensor.detach().view(-1)
        length = -(-flat.numel() // self._size)
        share = flat[self._rank * length : (self._rank + 1) * length]
        part = flat.new_zeros(length)  # backends gather equal sizes
        part[: share.numel()] = share
        kept = part, tensor.shape, tensor.device
        if not self._compared:
            self._compare(flat, self.unpack(kept).view(-1))
        return (part.cpu(), *kept[1:]) if self._to_host else kept

    def unpack(self, kept: Kept) -> Tensor:
        """**Collective.** The whole; ranks go backward through the same blocks in the same order."""
        part, shape, device = kept
        if shape is None:
            return part
        mine = part.to(device)
        everyones = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(everyones, mine, self._group)
        return torch.cat(everyones)[: shape.numel()].view(shape)

    def _compare(self, mine: Tensor, gathered: Tensor) -> None:
        """Parts of different wholes would train something else, in silence. As bytes: what is not a number equals itself."""
        same = torch.tensor(float(torch.equal(mine.view(torch.uint8), gathered.view(torch.uint8))), device=mine.device)
        dist.all_reduce(same, dist.ReduceOp.MIN, self._group)
        if not same:
            raise EngineError(
                f"{_KEY}: ranks that share layers have different inputs to {self._name}; "
                "name whole blocks in dsframe.model.activation_checkpointing, or write false"
            )
        self._compared = True

"""What a rank sends: every collective of a stretch of code, counted where PyTorch and Horovod hand it to the network.

    with Communication() as sent:
        engine.train_step(batches)
    print(sent.by_kind)

Libraries call torch.distributed from Python and from C++ (DDP's reducer does), but every call passes torch's dispatcher, as an
operator of the namespace ``c10d`` or ``_c10d_functional`` with its tensors and its process group as arguments: there it is
counted, whoever made it. Not seen are collectives that a callback starts on a thread of its own, such as the second round of
DDP's PowerSGD hook. Horovod does not use torch.distributed: what is handed to its background thread is counted instead.

Counted are the bytes of the whole tensors, not those that an algorithm sends.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Traffic:
    """All collectives of one kind, as this rank saw them."""

    calls: int = 0
    payload_bytes: int = 0
    """Of the whole tensors: what each rank begins with (reduce-scatter, all-to-all) or ends with (the others)."""


_SILENT = frozenset({"barrier", "monitored_barrier_", "check_for_nan", "wait_tensor", "_wrap_tensor_autograd"})
# Operator -> kind, and the number of the argument that is the payload.
_OPERATORS = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "allgather_coalesced_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "alltoall_base_": ("all-to-all", 1),
    "alltoall_": ("all-to-all", 1),
    "send": ("send", 0),
    "recv_": ("receive", 0),
    "recv_any_source_": ("receive", 0),
}
_PIECES = {"gather_": ("gather", 1), "scatter_": ("scatter", 0)}
"""These have every rank's piece on the root alone: the piece that each rank has is counted, times the ranks."""
_FUNCTIONAL = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "all_reduce_coalesced_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "reduce_scatter_tensor_out": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
"""Functional collectives: the first argument is what goes in, the last the group's name (but for ``out``)."""
_HOROVOD = {
    "_allreduce_async": "all-reduce",
    "_grouped_allreduce_async": "all-reduce",
    "_broadcast_async": "broadcast",
}
"""Functions of ``horovod.torch.mpi_ops`` that hand tensors over, the first argument being these."""


class Communication(TorchDispatchMode):
    """Counts while it is entered. Every operator takes a detour through Python meanwhile, so do not take times."""

    def __init__(self):
        super().__init__()
        self.by_kind = {}
        self._patches = ExitStack()

    def add(self, kind, payload):
        """One collective with so many bytes of payload."""
        traffic = self.by_kind.setdefault(kind, Traffic())
        traffic.calls += 1
        traffic.payload_bytes += payload

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        """Counts ``operator`` where it is a collective, and runs it."""
        name = operator.overloadpacket.__name__
        if operator.namespace == "c10d" and name not in _SILENT:
            self._count_c10d(name, args)
        elif operator.namespace == "_c10d_functional" and name not in _SILENT:
            self._count_functional(name, args, kwargs or {})
        return operator(*args, **(kwargs or {}))

    def _count_c10d(self, name, args):
        group = next(group for group in map(_group, args) if group is not None)
        if name in _PIECES:
            kind, position = _PIECES[name]
            self.add(kind, _bytes(args[position]) * group.size())
            return
        if name not in _OPERATORS:
            raise NotImplementedError(f"c10d::{name} is a collective that dsframe cannot count yet")
        kind, position = _OPERATORS[name]
        self.add(kind, _bytes(args[position]))

    def _count_functional(self, name, args, kwargs):
        if name not in _FUNCTIONAL:
            raise NotImplementedError(f"_c10d_functional::{name} is a collective that dsframe cannot count yet")
        label = next(value for value in reversed(args) if isinstance(value, str))
        group = distributed_c10d._resolve_process_group
        ranks = group(label).size()
        pieces = ranks if _FUNCTIONAL[name] == "all-gather" else 1
        self.add(_FUNCTIONAL[name], _bytes(args[0]) * pieces)

    def __enter__(self):
        horovod = sys.modules.get("horovod.torch.mpi_ops")
        # Imported is not started: a library's module may be there without a job of its own.
        for name, kind in _HOROVOD.items() if horovod and horovod.is_initialized() else ():
            watched = self._watched(getattr(horovod, name), kind)
            self._patches.enter_context(mock.patch.object(horovod, name, watched))
        super().__enter__()
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def _watched(self, function, kind):
        def counting(tensors, *args, **kwargs):
            self.add(kind, _bytes(tensors))
            return function(tensors, *args, **kwargs)

        return counting


def _bytes(tensors):
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


def _group(argument):
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except (RuntimeError, TypeError):  # a ReduceOp
            return None
    return None

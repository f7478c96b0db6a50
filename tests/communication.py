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
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "send", "recv")
"""A kind's operators begin with its name, as ``allgather_into_tensor_coalesced_`` and ``_reduce_scatter_base_`` do."""
_INTO_ANOTHER = ("reduce-scatter", "all-to-all")
"""Kinds whose operators of ``c10d`` have the payload in their second argument."""
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
            self._count_functional(name, args)
        return operator(*args, **(kwargs or {}))

    def _count_c10d(self, name, args):
        kind = _kind_of(name)
        self.add(kind, _bytes(args[kind in _INTO_ANOTHER]))

    def _count_functional(self, name, args):
        """The first argument is what goes in, the last the group's name, but for ``out``."""
        kind = _kind_of(name)
        label = next(value for value in reversed(args) if isinstance(value, str))
        ranks = distributed_c10d._resolve_process_group(label).size()
        self.add(kind, _bytes(args[0]) * (ranks if kind == "all-gather" else 1))

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


def _kind_of(name):
    """Raises NotImplementedError for a collective of another kind."""
    plain = name.replace("_", "")
    for kind in _KINDS:
        if plain.startswith(kind.replace("-", "")):
            return kind
    raise NotImplementedError(f"{name} is a collective that dsframe cannot count yet")

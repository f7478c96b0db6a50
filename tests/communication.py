"""Counts the collectives of a stretch of code, where PyTorch and Horovod hand them to the network.

Libraries call torch.distributed from Python and from C++ (DDP's reducer does), but every call passes torch's dispatcher, as an
operator of the namespace ``c10d`` or ``_c10d_functional``. Horovod hands tensors to functions of its own.
"""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "all-reduce": "allreduce|all_reduce",
    "all-gather": "all_?gather",
    "reduce-scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "all-to-all": "all_?to_?all",
    "send": "send|recv",
}
"""Kind -> pattern of the names of its operators."""
_HOROVOD = {"_allreduce_async": "all-reduce", "_grouped_allreduce_async": "all-reduce", "_broadcast_async": "broadcast"}


@dataclass
class Traffic:
    """All collectives of one kind, as this rank saw them."""

    calls: int = 0
    payload_bytes: int = 0
    """Of the whole tensors: what each rank begins with (reduce-scatter) or ends with (the others)."""


class Communication(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[str, Traffic] = {}
        self._patches = ExitStack()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), "")
        if kind and operator.namespace == "c10d":
            self._add(kind, args[int(kind == "reduce-scatter")])  # the second argument goes in
        elif kind and operator.namespace == "_c10d_functional":
            label = next(value for value in reversed(args) if isinstance(value, str))
            group: Any = distributed_c10d._resolve_process_group
            self._add(kind, args[0], group(label).size() if kind == "all-gather" else 1)
        return operator(*args, **(kwargs or {}))

    def __enter__(self) -> Communication:
        horovod: Any = sys.modules.get("horovod.torch.mpi_ops")
        # Imported is not started: other tests of the same process may have had Horovod, and ended it.
        for name, kind in _HOROVOD.items() if horovod and horovod.is_initialized() else ():
            watched = self._watched(getattr(horovod, name), kind)
            self._patches.enter_context(mock.patch.object(horovod, name, watched))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _watched(self, function: Any, kind: str) -> Any:
        def counting(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._add(kind, tensors)
            return function(tensors, *args, **kwargs)

        return counting

    def _add(self, kind: str, tensors: Any, pieces: int = 1) -> None:
        traffic = self.by_kind.setdefault(kind, Traffic())
        traffic.calls += 1
        traffic.payload_bytes += pieces * sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))

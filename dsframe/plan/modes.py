"""torch modes under which a model runs on the meta device: what is skipped, what is done another way, what is counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name that every torch program uses
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsframe.report.flops import flops_of

_FREE = {"aten._unsafe_view.default", "aten.empty_like.default", "aten.empty.memory_format", "aten.detach_.default"}
"""Neither read nor write memory, beside the views."""
_RANDOM = {"normal_", "uniform_", "trunc_normal_", "bernoulli_", "random_"}


class NoNumbers(TorchFunctionMode):
    """Skips filling with random numbers: on the meta device torch does it in Python, in seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _RANDOM and args and isinstance(args[0], Tensor):
            return args[0]
        return func(*args, **(kwargs or {}))


class Attention(TorchFunctionMode):
    """Runs attention by the kernel that keeps no matrix of scores, as CPUs and GPUs do; the meta device would keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.heads = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        query, key, value = (given[name] for name in ("query", "key", "value"))
        if key.shape[-3] != query.shape[-3]:  # grouped queries
            key, value = (t.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for t in (key, value))
        self.calls, self.heads = self.calls + 1, int(query.shape[-3])
        mask = given.get("attn_mask")
        mask = mask.to(query.dtype) if mask is not None else None
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, bool(given.get("is_causal")), attn_mask=mask)[0]


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of every operation that is no view: FLOPs, bytes, and whether tensor parallelism leaves it whole (1.0, else 0.0), as it does
    with what is no product and has results as wide as the model: norms and sums of residuals, not what stands between products."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[float, float, float]] = []
        self.largest = 0.0
        self._width = width

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or str(func) in _FREE:
            return out
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        written = sum(result.nbytes for result in results)
        read = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        flops = flops_of(func, args, kwargs or {}, out)
        wide = any(result.ndim and result.shape[-1] == self._width for result in results)
        self.operations.append((flops, float(read + written), float(wide and not flops)))
        self.largest = max(self.largest, float(written))
        return out

"""Model FLOPs utilization: the operations that the model needs, as a share of what the machine can do (Chowdhery et al. 2022,
arXiv 2204.02311, appendix B). Needed are those of one forward and one backward pass; what is computed again is not counted.

What the machine can do is measured, not read off a data sheet: products of two large matrices, on all ranks at the same time, with
the threads and in the number format of the training.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

_BUDGET_SECONDS = 0.15
_LONG_ENOUGH_SECONDS = 3e-3
"""Of one product, for the largest matrices that are tried."""


@dataclass(frozen=True)
class Utilization:
    """What it takes to turn a rate into a share."""

    flops_per_unit: float
    """Of the model, for one sample or token."""
    peak_flops: float
    """A second, of all ranks together."""

    def of(self, rate: float) -> float:
        """``rate``: units a second over all ranks."""
        return rate * self.flops_per_unit / self.peak_flops


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP a second of this rank, the best of some products of matrices; takes about 0.2 s.

    Matrices grow until a product takes a few milliseconds: where a format has no instructions of its own (fp16 on most CPUs) a
    large product would take seconds.
    """
    size, largest, best = 256, 8192 if device.type == "cuda" else 1024, 0.0
    limit = time.perf_counter() + _BUDGET_SECONDS
    left, right = _operands(size, dtype, device)
    _product(left, right)  # starts libraries
    while True:
        seconds = _product(left, right)
        best = max(best, 2.0 * size**3 / seconds)
        if time.perf_counter() > limit:
            return best
        if seconds < _LONG_ENOUGH_SECONDS and size < largest:
            size *= 2
            left, right = _operands(size, dtype, device)
            _product(left, right)


def _operands(size: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((size, size), 0.5, dtype=dtype, device=device), torch.ones(size, size, dtype=dtype, device=device)


def _product(left: torch.Tensor, right: torch.Tensor) -> float:
    """Seconds of one."""
    if left.device.type == "cuda":
        torch.cuda.synchronize(left.device)
    began = time.perf_counter()
    torch.mm(left, right)
    if left.device.type == "cuda":
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - began

"""Memory of one rank for copies that are saved in the background; reused by every save.

The first write to new memory costs two to three times as much processor time as the copy itself, because the system
provides it page by page. A run's peak is the same either way, since training continues during a save. Huge pages
(``MADV_HUGEPAGE``) were tried and dropped: most copies take a third of the time, but some, for which the system first
moves other pages, ten times as long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

ALIGN = 64


class Staging:
    """One block of memory, filled from its beginning in each save."""

    def __init__(self) -> None:
        self._block, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._making: threading.Thread | None = None

    def reserve(self, sizes: Iterable[int], *, ahead: bool = False) -> None:
        """Reserves room for copies of these sizes in bytes; copies of the previous save become invalid. ``ahead``:
        touch the pages in a thread, while the steps before the first save run."""
        if self._making is not None:
            self._making.join()
        size, self._used = sum(map(_aligned, sizes)), 0
        if size > self._block.numel():
            self._block = torch.empty(0, dtype=torch.uint8)  # free the old block first
            self._block = torch.empty(size, dtype=torch.uint8)
            if ahead:
                self._making = threading.Thread(target=self._block.zero_, name="dsframe-staging", daemon=True)
                self._making.start()

    def copy(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a copy of ``flat`` (1-d) on the CPU as ``dtype``; valid until memory is reserved for the next save."""
        size = flat.numel() * dtype.itemsize
        staged = self._block[self._used : self._used + size].view(dtype)
        self._used += _aligned(size)
        if flat.device.type == "cpu" and flat.dtype == dtype and flat.is_contiguous():
            # Uses C's memmove: above a certain size it bypasses the caches, and takes 0.6 of the time of copy_.
            np.copyto(staged.view(torch.uint8).numpy(), flat.view(torch.uint8).numpy())
            return staged
        return staged.copy_(flat)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN

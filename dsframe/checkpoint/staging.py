"""Memory of one rank for copies of what is saved in the background; it stays from one save to the next.

The first write to fresh memory costs two to three times as much processor time as the copy itself: the system hands it out page by
page. A run's peak is the same either way, since training continues while a save is being written. Huge pages were tried
(``MADV_HUGEPAGE``) and dropped: most copies take a third of the time, and some, for which the system first moves other pages, ten
times as long.
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
        """Makes room for copies of so many bytes each: none of the save before is needed any more. ``ahead``: it is taken from the
        system page by page, in a thread, while the steps before the first save run."""
        if self._making is not None:
            self._making.join()
        size, self._used = sum(map(_aligned, sizes)), 0
        if size > self._block.numel():
            self._block = torch.empty(0, dtype=torch.uint8)  # never both
            self._block = torch.empty(size, dtype=torch.uint8)
            if ahead:
                self._making = threading.Thread(target=self._block.zero_, name="dsframe-staging", daemon=True)
                self._making.start()

    def copy(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns ``flat``, of one dimension, on the CPU as ``dtype``; it holds until memory is reserved for the next save."""
        size = flat.numel() * dtype.itemsize
        staged = self._block[self._used : self._used + size].view(dtype)
        self._used += _aligned(size)
        if flat.device.type == "cpu" and flat.dtype == dtype and flat.is_contiguous():
            # By C's memmove: above a size of its own it writes past the caches, and takes 0.6 of the time of copy_.
            np.copyto(staged.view(torch.uint8).numpy(), flat.view(torch.uint8).numpy())
            return staged
        return staged.copy_(flat)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN

"""Memory of one rank for copies of what is saved in the background; it stays from one save to the next.

The first write to fresh memory costs two to three times as much processor time as the copy itself: the system hands it out page by
page. A run's peak is the same either way, since training continues while a save is being written. Huge pages were tried
(``MADV_HUGEPAGE``) and dropped: most copies take a third of the time, and some, for which the system first moves other pages, ten
times as long.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20
ALIGN = 64


class Staging:
    """Blocks of memory, filled from the first on in each save."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._block = self._used = 0
        self._making: threading.Thread | None = None

    def reserve(self, size: int) -> None:
        """Takes ``size`` bytes from the system in a thread, page by page, while the steps before the first save run."""
        block = torch.empty(size, dtype=torch.uint8)
        self._blocks.append(block)
        self._making = threading.Thread(target=block.zero_, name="dsframe-staging", daemon=True)
        self._making.start()

    @property
    def bytes(self) -> int:
        """Size of all blocks."""
        return sum(block.numel() for block in self._blocks)

    def begin(self) -> None:
        """A save begins: no copy of the one before is needed any more."""
        if self._making is not None:
            self._making.join()
        self._block = self._used = 0

    def copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns ``tensor``, contiguous and on the CPU, as ``dtype``; it holds until the next save begins."""
        wanted = dtype or tensor.dtype
        size = tensor.numel() * wanted.itemsize
        while self._block < len(self._blocks) and self._used + size > self._blocks[self._block].numel():
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            self._blocks.append(torch.empty(max(BLOCK_BYTES, size), dtype=torch.uint8))
        staged = self._blocks[self._block][self._used : self._used + size].view(wanted).view(tensor.shape)
        self._used += -(-size // ALIGN) * ALIGN
        return staged.copy_(tensor.detach())

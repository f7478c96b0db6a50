"""Copies batches to a device ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from dsframe.data.source import Batch

READER = "dsframe-reader"
"""Name prefix of the thread that reads ahead."""


class Ahead:
    """Copies each batch to a device before the previous one is yielded.

    On a GPU copies run on their own stream, concurrently with the step.
    """

    def __init__(self, device: torch.device, finish: Callable[[Batch], Batch] | None = None) -> None:
        """``finish``: remaining work on the device."""
        self._device, self._finish = device, finish or (lambda batch: batch)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        held: list[tuple[Batch, Any]] = []
        for batch in batches:
            held.append(self._start(batch))
            if len(held) == 2:
                yield self._arrived(*held.pop(0))
        for waiting in held:
            yield self._arrived(*waiting)

    def in_thread(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Same, but reads, pins and sends batches in a thread while this one launches the previous step's kernels."""
        if self._stream is None:
            yield from self(batches)
            return
        begin = partial(torch.cuda.set_device, self._device)  # memory is pinned for a thread's current device
        with ThreadPoolExecutor(1, READER, begin) as reader:
            coming = reader.submit(self._read, batches)
            while (item := coming.result()) is not None:
                coming = reader.submit(self._read, batches)
                yield self._arrived(*item)

    def _read(self, batches: Iterator[Batch]) -> tuple[Batch, Any] | None:
        batch = next(batches, None)
        return None if batch is None else self._start(batch)

    def _start(self, batch: Batch) -> tuple[Batch, Any]:
        """Returns the batch on the device, and the event after its copies."""
        if self._stream is None:
            return self._finish(_moved(batch, lambda leaf: leaf.to(self._device, non_blocking=True))), None
        with torch.cuda.stream(self._stream):
            # Only copies from pinned memory are asynchronous; torch keeps it alive until the copy is done. A tensor
            # with gaps would go through pageable memory.
            moved = _moved(batch, lambda leaf: _dense(leaf).pin_memory().to(self._device, non_blocking=True))
            return self._finish(moved), self._stream.record_event()

    def _arrived(self, batch: Batch, copied: Any) -> Batch:
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for leaf in tree_leaves(batch):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(current)  # keeps the memory until this stream has used it
        return _mapped(batch, self._moved_object)

    def _moved_object(self, leaf: Any) -> Any:
        """Moves an object with its own ``to``, such as a graph, on the stream that uses it: its tensors are unknown."""
        moves = callable(getattr(leaf, "to", None)) and not isinstance(leaf, (Tensor, nn.Module))
        return leaf.to(self._device) if moves else leaf


def _moved(batch: Batch, move: Callable[[Tensor], Tensor]) -> Batch:
    def of_host(leaf: Any) -> Any:
        return move(leaf) if isinstance(leaf, Tensor) and leaf.device.type == "cpu" else leaf

    return _mapped(batch, of_host)


def _mapped(batch: Batch, function: Callable[[Any], Any]) -> Batch:
    """Applies ``function`` to every leaf. A PackedSequence is one leaf, because a part of it stays on the CPU."""
    inputs, targets = tree_map(function, batch, is_leaf=lambda part: isinstance(part, PackedSequence))
    return inputs, targets


def _dense(leaf: Tensor) -> Tensor:
    """Returns ``leaf``, made contiguous unless it is dense in some order of dimensions."""
    return leaf if torch.ops.aten.is_non_overlapping_and_dense(leaf) else leaf.contiguous()

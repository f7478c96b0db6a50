"""Writes one rank's part of a state: the ranges that it holds, each to its position in files laid out in advance.

    model.safetensors, or model-00001-of-00003.safetensors, ...     weights and buffers, with the model's names
    optimizer.safetensors, or optimizer-00001-of-00006...           optimizer state: ``KEY/NAME``
    buffers.safetensors                                             of ranks with others than rank 0: ``rank-00003/NAME``

A safetensors file's header says where each tensor's bytes are before they are written. What a rank holds of a tensor
(all of it, rows, a range of ZeRO's flat tensors) is one range of bytes in the file. So every rank writes its own
ranges, nothing is sent, and the files are the same for every engine and number of ranks. Ranks with the same range take
turns. An engine that must gather a tensor to know its range (one split by columns) gathers one tensor at a time.

A synchronous save writes a range from its memory, or through a window from a GPU or another dtype. A background save
copies it first, and a thread writes the copy. When every rank's ranges are on the disk, the manifest, one rename, and
``latest`` follow (``background``, ``store``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dsframe.checkpoint.byte_files import RangeWriter, Run, catch_io_error
from dsframe.checkpoint.layout import Layout, buffers_of, shards_of, whole
from dsframe.checkpoint.staging import Staging
from dsframe.cluster.exchange import Ranks
from dsframe.model.digests import flat_copy
from dsframe.model.state import EngineState, TensorShard
from dsframe.text import Json

WINDOW_BYTES = 32 << 20
"""Bytes copied to host memory, or to another dtype, at a time: the extra memory of a rank in a synchronous save."""


class Writer:
    """One rank's part of one save."""

    def __init__(
        self,
        ranks: Ranks,
        state: EngineState,
        folder: Path,
        *,
        staging: Staging | None = None,
        layout: Layout | None = None,
    ) -> None:
        """**Collective.** Lays out the files for ``state``; consumes its parameters if they are an iterator.
        ``staging``: :meth:`take` copies there, and :meth:`flush` writes. ``layout``: that of the run's previous save.
        Raises CheckpointError as :meth:`Layout.agree` does."""
        world = ranks.plan.world
        self.plan, scalars = (layout or Layout()).agree(ranks, state)
        by_key: dict[str, Json] = {buffers_of(0): {}}
        parameters: dict[str, Json] = {name: {"tensors": {}, "scalars": of} for name, of in scalars.items()}
        for (name, key), at in self.plan.tensors.items():
            if key.startswith("rank-"):
                by_key.setdefault(key, {})[name] = at
            else:
                parameters[name]["tensors"][key] = at
        self.manifest: Json = {"parameters": parameters, "buffers": by_key}
        """The manifest's entries of parameters and buffers; the same on every rank."""
        self._rank, self._staging = world.rank, staging
        self._files = RangeWriter(folder, several_hosts=world.local_size < world.size, ahead=staging is not None)
        if staging is not None:
            staging.reserve(self.sizes)
        self._kept: list[tuple[str, int, Tensor]] = []
        self._window: Tensor | None = None

    @property
    def sizes(self) -> list[int]:
        """Size in bytes of each range that this rank writes."""
        return [piece.bytes for pieces in self.plan.pieces.values() for piece in pieces]

    @property
    def runs(self) -> Mapping[str, list[Run]]:
        """What this rank has written; valid after :meth:`flush`."""
        return self._files.runs

    def take(self, state: EngineState, sign_of_life: Callable[[], None]) -> str:
        """**Collective** if the engine gathers. Writes or copies this rank's ranges; returns the disk's error, or "".

        ``state``: as laid out. After an error it continues without writing, for the collectives of other ranks.
        """
        failure = ""
        for name, begin in self.plan.headers.items() if self._rank == 0 else ():
            failure = failure or catch_io_error(partial(self._files.put, name, 0, begin))
        for name, buffer in state.buffers.items():
            copied = replace(whole(buffer, buffer.dtype), read=partial(flat_copy, buffer))
            failure = self._take(name, buffers_of(self._rank), copied, failure)
        for shard in shards_of(state):
            for key, tensor in shard.tensors.items():
                failure = self._take(shard.name, key, tensor, failure)
                sign_of_life()
        return failure

    def _take(self, name: str, key: str, tensor: TensorShard, failure: str) -> str:
        pieces = self.plan.pieces.get((name, key), ())
        if pieces or tensor.in_order:
            flat = tensor.read().detach().resolve_neg().reshape(-1)
            for piece in pieces:
                content = flat.narrow(0, piece.first - tensor.first, piece.size)
                failure = failure or catch_io_error(partial(self._put, piece.file, piece.begin, content, tensor.dtype))
        return failure

    def _put(self, name: str, begin: int, content: Tensor, dtype: torch.dtype) -> None:
        if self._staging is not None:
            self._kept.append((name, begin, self._staging.copy(content, dtype)))
            return
        direct = content.device.type == "cpu" and content.dtype == dtype and content.is_contiguous()
        step = content.numel() if direct else WINDOW_BYTES // dtype.itemsize
        for low in range(0, content.numel(), step or 1):
            part = content[low : low + step]
            self._files.put(
                name, begin + low * dtype.itemsize, bytes_of(part if direct else self._on_host(part, dtype))
            )

    def _on_host(self, content: Tensor, dtype: torch.dtype) -> Tensor:
        if self._window is None:
            self._window = torch.empty(WINDOW_BYTES, dtype=torch.uint8, pin_memory=content.device.type == "cuda")
        return self._window[: content.numel() * dtype.itemsize].view(dtype).copy_(content)

    def flush(self, sign_of_life: Callable[[], None]) -> None:
        """Writes what was copied; everything is on the disk on return. Raises OSError."""
        self._window = None
        for name, begin, content in self._kept:
            self._files.put(name, begin, bytes_of(content))
            sign_of_life()
        self._files.finish(sign_of_life)

    def close(self) -> None:
        """Closes the files of a save that has failed."""
        self._files.close()


def bytes_of(content: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU."""
    data: memoryview = content.view(torch.uint8).numpy().data
    return data

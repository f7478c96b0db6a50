"""Saving sharded parameters: each rank gets what it writes, window by window, and nothing else.

A window is so many bytes that no rank sends, and none writes, more than ``WINDOW_BYTES`` of it. While one is on its way, a thread
writes the one before into files, so that in addition to its state a rank holds at most one window to send and two to write, on GPUs
one more on the device. What a rank holds itself is written from where it lies.

Where all ranks see the folder through one kernel, as on one host, a save at once exchanges nothing: each rank writes what it holds
into its place in the files, whoever's they are, and their owner reads the checksum when all have written.

In the background the rank's own ranges are copied first, and the exchange is the thread's, over Gloo in a process group of its own:
collectives of training and of a save have no common order, and need none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsframe.checkpoint import layout
from dsframe.checkpoint.layout import Chunk, Content
from dsframe.checkpoint.portable import PART_BYTES, header, write_tensors
from dsframe.checkpoint.staging import Staging
from dsframe.checkpoint.store import FileEntry, FileWriter, folder_id, read_entry, sync_files, write_range
from dsframe.cluster.exchange import Ranks, all_gather_text
from dsframe.model.state import ParameterShard, TensorShard

WINDOW_BYTES = 64 << 20
"""A rank's memory grows by at most four times as much in a save, 256 MiB, in addition to a copy of its own ranges."""
SHARD_BYTES = 1 << 30
"""Size of the files of the sharded form: few, and enough for many ranks to verify them together."""

Place = tuple[str, str]
"""A tensor of the state: the parameter's name, and the key."""


class ShardWriter:
    """One rank's part in writing a sharded state."""

    def __init__(
        self,
        ranks: Ranks,
        shards: Sequence[ParameterShard],
        folder: Path,
        *,
        sharded: bool,
        part_bytes: int | None = None,
        window_bytes: int = WINDOW_BYTES,
        sync: bool = True,
    ) -> None:
        """**Collective.** ``sharded``: each rank writes its own ranges. ``sync``: files are on the disk when
        :meth:`write` returns, else :meth:`flush` brings them there, when all ranks have written. Raises
        CheckpointError as ``layout.agree_on_parameters`` does."""
        world = ranks.plan.world
        self.files: dict[str, FileEntry] = {}
        """Files of this rank, when they are written; without ``sync``, when they are flushed."""
        size = part_bytes or (SHARD_BYTES if sharded else PART_BYTES)
        self._plan = layout.plan(layout.agree_on_parameters(ranks, shards), world.size, size, sharded=sharded)
        self.parameters = self._plan.parameters
        """The manifest's entry of every parameter."""
        self.exchanges = any(chunk.source != chunk.owner for chunk in self._plan.chunks)
        """True if some rank writes what another holds; the same on every rank."""
        one_kernel = self.exchanges and not sync and len(set(all_gather_text(ranks, folder_id(folder)))) == 1
        self._in_place: Mapping[str, bytes] | None = None
        """File -> its first bytes, where each rank writes what it holds into its place in the files of all."""
        if one_kernel:
            self.exchanges = False
            self._in_place = {name: _begin(of) for name, of in self._plan.files.items()}
        self._folder = folder
        self._rank = world.rank
        self._ranks = world.size
        self._window = window_bytes
        self._sync = sync
        self._device, self._group = ranks.plan.device, None
        self._held: _LiveShards | _StagedShards = _LiveShards(shards, world.rank)
        self._more: list[tuple[str, dict[str, Tensor]]] = []

    def add(self, name: str, tensors: dict[str, Tensor]) -> None:
        """One more file of this rank; ``tensors`` do not change until it is written."""
        self._more.append((name, tensors))

    def keep(self, staging: Staging, group: Any, sign_of_life: Callable[[], None]) -> None:
        """Copies this rank's ranges, so that training may continue. ``group``: over which :meth:`flush` exchanges them later."""
        assert isinstance(self._held, _LiveShards)
        kept = {}
        for chunk in self._plan.chunks:
            if (content := self._held.get(chunk)) is not None:
                kept[chunk.parameter, chunk.key] = staging.copy(content)
            sign_of_life()
        self._held = _StagedShards(kept, self._rank)
        self._group = group
        self._device = torch.device("cpu")

    def flush(self, sign_of_life: Callable[[], None]) -> None:
        """**Collective** where ranges were kept that are to be exchanged. Writes them; all files are on the disk when it returns.

        Raises OSError.
        """
        if isinstance(self._held, _StagedShards):
            self.write(sign_of_life)
        if self._in_place is not None:
            for name in self._own:
                size = len(self._in_place[name]) + self._plan.sizes[name]
                self.files[name] = read_entry(self._folder / name, size)
                sign_of_life()
        if not self._sync:
            sync_files(self._folder, self.files, sign_of_life)

    def write(self, sign_of_life: Callable[[], None]) -> None:
        """**Collective** where there is something to exchange. Writes this rank's files.

        After a failure it takes part to the end without writing. Raises OSError then.
        """
        if self._in_place is not None:
            self._write_in_place(self._in_place, sign_of_life)
        else:
            self._write_windows(sign_of_life)
        for name, tensors in self._more:
            self.files[name] = write_tensors(self._folder / name, tensors, sync=self._sync)

    @property
    def _own(self) -> list[str]:
        return [name for name, owner in self._plan.owners.items() if owner == self._rank]

    def _write_in_place(self, headers: Mapping[str, bytes], sign_of_life: Callable[[], None]) -> None:
        failure: OSError | None = None
        for name, begin, content in self._ranges(headers):
            try:
                if failure is None:
                    write_range(self._folder / name, begin, content)
            except OSError as error:
                failure = error
            sign_of_life()
        if failure is not None:
            raise failure

    def _ranges(self, headers: Mapping[str, bytes]) -> Iterator[tuple[str, int, bytes | memoryview]]:
        """File, first byte and content of all that this rank writes. To be read to the end: where a shard's reading is
        collective, others wait for it. A content holds until the next."""
        for name in self._own:
            yield name, 0, headers[name]
        pinned: Tensor | None = None
        for chunk in self._plan.chunks:
            content = self._held.get(chunk)
            if content is None:
                continue
            offset, flat = len(headers[chunk.file]) + chunk.begin, content.view(torch.uint8)
            for first in range(0, chunk.bytes, self._window):
                piece = flat[first : first + self._window]
                if piece.device.type != "cpu":
                    pinned = torch.empty(self._window, dtype=torch.uint8, pin_memory=True) if pinned is None else pinned
                    piece = pinned[: piece.numel()].copy_(piece)
                yield chunk.file, offset + first, piece.numpy().data

    def _write_windows(self, sign_of_life: Callable[[], None]) -> None:
        plan = self._plan
        files = {self._folder / name: plan.files[name] for name in self._own}
        sink = _Sink(files, self._sync)
        exchange = _Exchange(self._rank, self._ranks, self._device, self._group)
        try:
            for window in plan.windows(self._window):
                sink.take(exchange.run(window, self._held))
                sign_of_life()
        finally:
            self.files |= sink.finish()


class _LiveShards:
    """This rank's ranges where they lie."""

    def __init__(self, shards: Sequence[ParameterShard], rank: int) -> None:
        self._shards = {(shard.name, key): tensor for shard in shards for key, tensor in shard.tensors.items()}
        self._rank = rank
        self._place: Place | None = None
        self._tensor: Tensor | None = None

    def get(self, chunk: Chunk) -> Tensor | None:
        """The chunk's elements where this rank is their source. To be asked for every chunk, in turn."""
        place = (chunk.parameter, chunk.key)
        shard = self._shards.get(place)
        if place != self._place:
            self._place = place
            self._tensor = _read(shard) if shard is not None and shard.in_order else None
        if chunk.source != self._rank:
            return None
        assert shard is not None
        if self._tensor is None:
            self._tensor = _read(shard)
        return self._tensor.narrow(0, chunk.skip, chunk.size)


def _begin(contents: Sequence[Content]) -> bytes:
    return header({content.name: (content.dtype, content.shape) for content in contents})[0]


def _read(shard: TensorShard) -> Tensor:
    return shard.read().detach().to(shard.dtype).contiguous().view(-1)


class _StagedShards:
    """Copies of this rank's ranges."""

    def __init__(self, tensors: dict[Place, Tensor], rank: int) -> None:
        self._tensors, self._rank = tensors, rank
        self._place: Place | None = None
        self._tensor = torch.zeros(0)

    def get(self, chunk: Chunk) -> Tensor | None:
        """As :meth:`_LiveShards.get`."""
        if chunk.source != self._rank:
            return None
        if (chunk.parameter, chunk.key) != self._place:
            self._place = (chunk.parameter, chunk.key)
            self._tensor = self._tensors.pop(self._place)
        return self._tensor.narrow(0, chunk.skip, chunk.size)


class _Exchange:
    """Brings what one rank writes from those that hold it."""

    def __init__(self, rank: int, ranks: int, device: torch.device, group: Any) -> None:
        self._rank, self._ranks, self._device, self._group = rank, ranks, device, group
        self._buffers: dict[str, Tensor] = {}
        self._turn = 0

    def run(self, window: Sequence[Chunk], held: _LiveShards | _StagedShards) -> list[Tensor]:
        """**Collective** if a chunk changes rank. What this rank writes of the window, in order: bytes on the CPU, which hold until
        the call after the next."""
        self._turn ^= 1
        away = [chunk for chunk in window if chunk.source != chunk.owner]
        sent, got = [0] * self._ranks, [0] * self._ranks
        for chunk in away:
            sent[chunk.owner] += chunk.bytes * (chunk.source == self._rank)
            got[chunk.source] += chunk.bytes * (chunk.owner == self._rank)
        outgoing = self._buffer("send", sum(sent))
        incoming = self._buffer(f"receive {self._turn}", sum(got))
        to = list(itertools.accumulate(sent, initial=0))
        at = list(itertools.accumulate(got, initial=0))
        contents = []
        for chunk in window:
            content = held.get(chunk)
            if content is not None and chunk.owner == self._rank:
                contents.append(content.view(torch.uint8))
            elif content is not None:
                outgoing[to[chunk.owner] : to[chunk.owner] + chunk.bytes] = content.view(torch.uint8)
                to[chunk.owner] += chunk.bytes
            elif chunk.owner == self._rank:
                contents.append(incoming[at[chunk.source] : at[chunk.source] + chunk.bytes])
                at[chunk.source] += chunk.bytes
        if away:
            dist.all_to_all_single(incoming, outgoing, got, sent, group=self._group)
        return contents if self._device.type == "cpu" else self._on_host(contents)

    def _buffer(self, name: str, size: int) -> Tensor:
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffers[name][:size]

    def _on_host(self, contents: Sequence[Tensor]) -> list[Tensor]:
        """Copies through pinned memory. A stream of its own would gain nothing: the disk takes far longer than the copy."""
        name, size = f"host {self._turn}", sum(content.numel() for content in contents)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        copies, begin = [], 0
        for content in contents:
            copies.append(self._buffers[name][begin : begin + content.numel()].copy_(content, non_blocking=True))
            begin += content.numel()
        torch.cuda.synchronize(self._device)
        return copies


class _Sink:
    """Files, written one after another by a thread from contents that come in their order."""

    def __init__(self, files: Mapping[Path, Sequence[Content]], sync: bool) -> None:
        self._sync = sync
        self._files = self._open(files)
        self._entries: dict[str, FileEntry] = {}
        self._writer: FileWriter | None = None
        self._left = 0
        self._executor = ThreadPoolExecutor(1, "dsframe-part")
        self._written: Future[None] | None = None
        self._failure: BaseException | None = None

    def take(self, contents: Sequence[Tensor]) -> None:
        """Writes ``contents`` when those before are written, and nothing after a failure."""
        self._wait()
        if contents and self._failure is None:
            self._written = self._executor.submit(self._write, contents)

    def finish(self) -> dict[str, FileEntry]:
        """Waits until all is written. Raises OSError."""
        self._wait()
        if self._failure is None:
            self._written = self._executor.submit(self._rest)
            self._wait()
        self._executor.shutdown()
        self._files.close()
        if self._failure is not None:
            raise self._failure
        return self._entries

    def _wait(self) -> None:
        if self._written is not None:
            self._failure = self._failure or self._written.exception()
            self._written = None

    def _open(self, files: Mapping[Path, Sequence[Content]]) -> Generator[None]:
        """Each step ends the file before, which is full, and begins the next."""
        for path, contents in files.items():
            begin, self._left = header({content.name: (content.dtype, content.shape) for content in contents})
            with FileWriter(path, sync=self._sync) as self._writer:
                self._writer.write(begin)
                yield
                self._entries[path.name] = self._writer.finish()
        self._writer = None

    def _write(self, contents: Sequence[Tensor]) -> None:
        for content in contents:
            while not self._left:
                next(self._files)
            assert self._writer is not None
            self._writer.write(content.numpy().data)
            self._left -= content.numel()

    def _rest(self) -> None:
        for _ in self._files:
            assert not self._left, "a file has less content than its header says"

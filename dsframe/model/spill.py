"""Builds a model larger than memory: large parameters are in unlinked files, whose pages are released to the kernel.

The user's constructor runs unchanged, so random numbers and later changes of a child's weights are bitwise those of a
build in memory. With ``deepspeed.zero.Init`` a parent that fills a child's weight again silently gets an empty tensor
(measured, deepspeed 0.19.8). Unlinked files leave nothing behind after a crash.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dsframe.errors import WorldError

LEAST_BYTES = 1 << 20
"""Smaller parameters stay in memory."""
WINDOW_BYTES = 64 << 20
"""The newest parameters stay in memory up to this size. After this many bytes in files, all pages are released."""
_DONTNEED = 4  # MADV_DONTNEED of sys/mman.h
_IN_MEMORY = {"tmpfs", "ramfs"}


class Spill:
    """Stores parameters in files in a folder on disk. Each file lives as long as a tensor uses it."""

    def __init__(
        self,
        folder: Path | None,
        least_bytes: int = LEAST_BYTES,
        window_bytes: int = WINDOW_BYTES,
        why: str = "",
        share: float = 0.0,
    ) -> None:
        """``folder``: exists on a disk (:func:`on_disk`); None: parameters stay in memory, for the reason ``why``.
        ``share``: Fraction of the model that stays in memory, if that is more than the window: the part that the rank
        will hold."""
        self.folder, self.why = folder, why
        self._least, self._window, self._share = least_bytes, window_bytes, share
        self._newest: dict[int, tuple[weakref.ref[nn.Parameter], int]] = {}  # by id, with their sizes in bytes
        self._waiting = self._made = 0
        # Kept until the end: a freed address may be reused by another tensor, which DONTNEED would fill with zeros.
        self._mapped: dict[int, torch.UntypedStorage] = {}
        self._fresh = 0

    @property
    def description(self) -> str:
        """Describes where the model is built, for the first lines of a run."""
        if self.folder is None:
            return f"the model is built in memory, whole on each rank: {self.why}; set TMPDIR to a folder on a disk"
        return f"the model is built in files of {self.folder}, whole in no rank's memory"

    @contextmanager
    def building(self) -> Iterator[None]:
        """Stores the large parameters of modules created inside the context in files."""
        with register_module_parameter_registration_hook(self._registered):
            yield
        self.evict()

    def add(self, parameter: nn.Parameter) -> None:
        """Takes a new parameter. It stays in memory while it is among the newest, then goes to a file. Most are
        initialized directly after creation, which is faster in memory than in a file's pages."""
        size = parameter.nbytes
        known, _ = self._newest.get(id(parameter), (None, 0))
        if self.folder is None or size < self._least or (known and known() is parameter) or self._holds(parameter.data):
            return
        # A deleted parameter may have had the same id.
        self._waiting -= self._newest.pop(id(parameter), (None, 0))[1]
        self._newest[id(parameter)] = (weakref.ref(parameter), size)
        self._waiting += size
        self._made += size
        while self._waiting > max(self._window, self._share * self._made):
            reference, bytes_of_it = self._newest.pop(next(iter(self._newest)))
            self._waiting -= bytes_of_it
            oldest = reference()  # None: its constructor has replaced it
            # A tensor that shares its memory would not see changes in the file.
            if oldest is not None and _users(oldest) == _ALONE:
                self.move(oldest)

    def move(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> None:
        """Moves one parameter to a file, as ``dtype``; only casts a small one."""
        data = parameter.data
        wanted = dtype or data.dtype
        size = data.numel() * wanted.itemsize
        if data.device.type != "cpu" or (wanted == data.dtype and self._holds(data)):
            return
        # A part of a larger tensor stays, because others sharing that memory would no longer see its values.
        part = not data.is_contiguous() or data.untyped_storage().nbytes() != data.nbytes
        part = part and wanted == data.dtype
        if self.folder is None or size < self._least or part:
            parameter.data = data.to(wanted)
            return
        parameter.data = self._on_disk(self.folder, data, wanted, size)
        self.touched(size + data.nbytes)

    def fetch(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> None:
        """Moves one parameter from a file to memory, as ``dtype``: changes would be written to the file."""
        data = parameter.data
        if self._holds(data):
            parameter.data = data.to(dtype or data.dtype, copy=True)
            self.touched(data.nbytes)
        else:
            parameter.data = data.to(dtype or data.dtype)

    def converted(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns ``tensor`` as ``dtype``, in a separate file if it is large; unchanged if it has that dtype."""
        if tensor.dtype == dtype:
            return tensor
        parameter = nn.Parameter(tensor, requires_grad=False)
        self.move(parameter, dtype)
        return parameter.data

    def touched(self, size: int) -> None:
        """Counts bytes of files that were read or written. Releases their pages if they exceed the window."""
        self._fresh += size
        if self._fresh > self._window:
            self.evict()

    def evict(self) -> None:
        """Releases the pages of all files; later reads come from the disk or its cache."""
        libc = ctypes.CDLL(None, use_errno=True)
        for start, storage in self._mapped.items():
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(storage.nbytes()), _DONTNEED)
        self._fresh = 0

    def close(self) -> None:
        """Releases the files when the engine has its shards. Files in use live as long as their tensors."""
        self.evict()
        self._newest.clear()
        self._mapped.clear()

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, nn.UninitializedParameter):
            self.add(parameter)

    def _holds(self, data: Tensor) -> bool:
        return data.untyped_storage().data_ptr() in self._mapped

    def _on_disk(self, folder: Path, data: Tensor, dtype: torch.dtype, size: int) -> Tensor:
        try:
            folder.mkdir(parents=True, exist_ok=True)  # the run's, on a node that does not share it
            handle, path = tempfile.mkstemp(prefix=".building-", dir=folder)
            try:
                # Reserves the space: if the disk filled later, SIGBUS would end this process silently.
                os.posix_fallocate(handle, 0, size)
                # Not through the mapping, which faults page by page: three times as fast (ext4, Linux 6.18).
                if data.dtype == dtype:
                    numbers: Any = data.contiguous().flatten().view(torch.uint8).numpy()
                    with open(handle, "wb", closefd=False) as file:
                        file.write(numbers)
                mapped = torch.from_file(path, shared=True, size=data.numel(), dtype=dtype).view(data.shape)
            finally:
                os.close(handle)
                Path(path).unlink()
        except OSError as error:
            raise WorldError(
                f"{folder}: no room for the model: {error.strerror}, {size / 2**20:,.0f} MiB more are needed. Weights lie in "
                "files there while a rank shards them, and while they are exported. Set TMPDIR to a folder on a larger disk"
            ) from error
        if data.dtype != dtype:  # without a copy of it in memory
            mapped.copy_(data)
        self._mapped[mapped.data_ptr()] = mapped.untyped_storage()
        return mapped


def _users(parameter: nn.Parameter) -> int:
    """Returns how many tensors and views share the parameter's storage, including two of this function."""
    return int(torch._C._storage_Use_Count(parameter.data.untyped_storage()._cdata))  # no public name in torch


_ALONE = _users(nn.Parameter(torch.empty(1)))


def on_disk(directory: Path, ranks: int = 1, window_bytes: int = WINDOW_BYTES) -> Spill:
    """Returns a spill in the folder for temporary files, else in the run's ``directory``; in memory if neither is on a
    disk. ``ranks``: Number of ranks that shard the model; if several, each keeps as much of it in memory as it will
    hold."""
    places = (Path(tempfile.gettempdir()), directory)
    for candidate in places:
        if is_disk(candidate):
            return Spill(candidate, window_bytes=window_bytes, share=1 / ranks if ranks > 1 else 0.0)
    return Spill(None, why=f"{' and '.join(map(str, places))} are not on a disk")


def is_disk(folder: Path) -> bool:
    """Returns False if files in ``folder`` are in memory (tmpfs), or if that is unknown."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    device = existing.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = [line.partition(" - ")[2].split(" ")[0] for line in lines if line.split(" ")[2] == wanted]
    return bool(kinds) and not set(kinds) & _IN_MEMORY

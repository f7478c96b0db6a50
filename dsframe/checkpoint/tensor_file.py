"""Writes one safetensors file of whole tensors, for exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsframe.checkpoint.byte_files import FileEntry, write
from dsframe.checkpoint.layout import Content, header
from dsframe.checkpoint.writer import bytes_of
from dsframe.values import Tensors


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> FileEntry:
    """Writes a safetensors file directly from the tensors' memory, also from views; it is on the disk on return.

    ``safetensors.save_file`` computes no checksum and does not accept views. Raises OSError, and CheckpointError for a
    dtype that the format does not have.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    begin, _ = header([Content(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered], metadata)
    contents = (bytes_of(tensor.contiguous().flatten()) for _, tensor in ordered)
    return write(path, begin, *contents)

"""Reads the idx files of MNIST and Fashion-MNIST."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dsframe.data.raw_bytes import mapped, read_bytes
from dsframe.errors import DataError


def read_idx(path: Path) -> Tensor:
    """Returns a byte array from MNIST's idx format (magic number and sizes, big endian, then data).

    Memory mapped unless compressed.
    """
    content = read_bytes(path) if path.suffix == ".gz" else _first_bytes(path)
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{path}: not an idx file of bytes (it starts with {content[:4].hex(' ') or 'nothing'})")
    dimensions = content[3]
    header = 4 + 4 * dimensions
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4)]
    size = math.prod(shape)
    bytes_read = len(content) if path.suffix == ".gz" else path.stat().st_size
    if bytes_read != header + size:
        raise DataError(
            f"{path}: truncated or damaged: its header says {' x '.join(map(str, shape))}, {header + size:,} bytes, "
            f"but it has {bytes_read:,}; delete it and fetch it again"
        )
    if path.suffix == ".gz":  # copied to make it writable, as torch requires
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy())
    return mapped(path, size, header).view(shape)


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4 + 4 * 255)  # the longest header
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error

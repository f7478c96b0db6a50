"""Reads files of bytes: whole, decompressed, or memory mapped. Errors name the file."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dsframe.errors import DataError


def read_bytes(path: Path) -> bytes:
    """Returns the file's content, decompressed if the name ends in ``.gz``."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: truncated or damaged ({error}); delete it and fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def mapped(path: Path, size: int, offset: int = 0) -> Tensor:
    """Returns ``size`` bytes of the file, uint8 ``[size]``, memory mapped and shared by the processes of a node.

    Raises DataError.
    """
    try:
        # copy-on-write, because torch warns about read-only arrays
        return torch.from_numpy(np.memmap(path, np.uint8, mode="c", shape=(size,), offset=offset))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error

"""A tokenizer's tokens of a text, made once and kept with the data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from dsframe.data.files import data_root, replacing, writing
from dsframe.errors import DataError

_PIECE = 1 << 20
"""Bytes that are tokenized at a time; a piece ends at the end of a line, where it has one."""


def encoded(text: Tensor, tokenize: Callable[[str], list[int]], digest: str, data_dir: str | None) -> Tensor:
    """The tokens of ``text`` (UTF-8, uint8 ``[bytes]``), int32 ``[tokens]``, memory mapped from a file under ``data_dir``.

    ``digest`` stands for the tokenizer: with the same one and the same text the file is used again. Several processes may make
    it at once. Raises DataError.
    """
    content = text.numpy()
    key = hashlib.sha256(digest.encode() + content.tobytes()).hexdigest()[:16]
    cache = data_root(data_dir) / "tokens" / f"{key}.int32"
    with writing(cache):
        if not cache.is_file():
            with replacing(cache) as out:
                for piece in _pieces(content.tobytes()):
                    out.write(np.asarray(tokenize(piece), np.int32).tobytes())
        if cache.stat().st_size == 0:
            raise DataError("the tokenizer makes no tokens of this text")
        return torch.from_numpy(np.memmap(cache, np.int32, mode="c"))


def _pieces(content: bytes) -> Iterator[str]:
    start = 0
    while start < len(content):
        end = start + _PIECE
        if end < len(content):
            end = content.rfind(b"\n", start, end) + 1 or end
        yield content[start:end].decode("utf-8", errors="replace")
        start = end

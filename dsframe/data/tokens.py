"""A tokenizer's tokens of a text, made once and kept with the data."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from dsframe.data.files import data_root, replacing, writing
from dsframe.errors import DataError

_FORM = 2
"""Version of how tokens are made: part of the files' names."""
_PIECE = 1 << 20
"""Bytes that are tokenized at a time; a piece ends at the end of a line, where it has one."""


def encoded(text: Tensor, tokenize: Callable[[str], list[int]], digest: str, data_dir: str | None) -> Tensor:
    """The tokens of ``text`` (UTF-8, uint8 ``[bytes]``), int32 ``[tokens]``, memory mapped from a file under ``data_dir``.

    ``digest`` stands for the tokenizer: with the same one and the same text the file is used again. Several processes may make
    it at once. Raises DataError.
    """
    content = text.numpy()
    key = hashlib.sha256(f"{_FORM}{digest}".encode() + content.tobytes()).hexdigest()[:16]
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
    decoder, start = codecs.getincrementaldecoder("utf-8-sig")(), 0  # some editors write a mark at the beginning
    while start < len(content):
        end = start + _PIECE
        if end < len(content):
            end = content.rfind(b"\n", start, end) + 1 or end
        try:
            yield decoder.decode(content[start:end], final=end >= len(content)).replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8 ({error.reason} after byte {start + error.start})") from None
        start = end

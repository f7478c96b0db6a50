"""Text corpora in memory-mapped files, and windows of them for language models."""

from __future__ import annotations

import sysconfig
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dsframe.data import documents
from dsframe.data.raw_bytes import mapped
from dsframe.data.source import Batch, draws
from dsframe.errors import DataError

_STDLIB_BYTES = 8 << 20  # enough for hours of training a small model; half of the library
_SYNTHETIC_BYTES = 1 << 20
_EVALUATION_TOKENS = 1 << 16  # so that evaluation takes seconds
_HEAD = 1 << 16  # bytes that show if a file is text


class TextSource:
    """Windows of ``context`` tokens; the target of each token is the next one.

    ``tokens``: integers ``[tokens]``: bytes (uint8) or a tokenizer's (int32). A batch is two int64 ``[n, context]``.
    The windows tile the text, so an epoch reads each token once; with ``shifted`` the tiling is moved each epoch (drawn
    from seed and epoch).
    """

    digest_of_files = ""
    """Digest of the contents of the files it was read from."""

    def __init__(self, tokens: Tensor, context: int, *, seed: int = 0, shifted: bool = False) -> None:
        self._tokens, self._context, self._seed, self._shifted = tokens, context, seed, shifted
        self._steps = torch.arange(context + 1)
        # The last target is one token after the last window; a shift takes up to context - 1 more tokens.
        self._length = (len(tokens) - (context if shifted else 1)) // context
        if self._length < 1:
            unit = "bytes" if tokens.dtype == torch.uint8 else "tokens"
            raise DataError(f"the text has {len(tokens):,} {unit}, too few for one window of {context}")

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Tensor, epoch: int) -> Batch:
        shift = 0
        if self._shifted:
            shift = (int(draws(self._seed, epoch, torch.tensor(0))) & 0x7FFF_FFFF) % self._context
        window = self._tokens[(indices * self._context + shift)[:, None] + self._steps].long()
        return window[:, :-1], window[:, 1:]


def sources(
    corpus: str, context: int, samples: int | None, seed: int, encode: Callable[[Tensor], Tensor] | None = None
) -> tuple[TextSource, TextSource]:
    """Returns training and validation windows of ``corpus``: ``stdlib``, ``synthetic``, or a path or glob of text
    files.

    ``encode``: text bytes, uint8 ``[bytes]`` -> tokens, int32 ``[tokens]``; default: the bytes are the tokens. The last
    twentieth, at most 65,536 tokens, is for validation. ``samples``: number of training windows. Raises DataError.
    """
    tokens = synthetic(_SYNTHETIC_BYTES) if corpus == "synthetic" else read_corpus(corpus)
    try:
        if encode is not None:
            tokens = encode(tokens)
        validation_tokens = min(len(tokens) // 20, _EVALUATION_TOKENS)
        training = tokens[: len(tokens) - validation_tokens]
        evaluation = tokens[len(tokens) - validation_tokens :]
        if samples is not None:
            training = training[: samples * context + context]
        return TextSource(training, context, seed=seed, shifted=True), TextSource(evaluation, context)
    except DataError as error:
        raise DataError(f"corpus {corpus}: {error} (a twentieth of it is kept for validation)") from error


def read_corpus(corpus: str) -> Tensor:
    """Returns the text's bytes, uint8 ``[bytes]``. Raises DataError.

    A single file is memory mapped, so processes of a node share it. Several are joined in memory, sorted by name.
    """
    files = stdlib_files() if corpus == "stdlib" else _matching(corpus)
    if len(files) == 1:
        skipped = len(BOM_UTF8) * _head(files[0]).startswith(BOM_UTF8)
        return mapped(files[0], files[0].stat().st_size - skipped, skipped)
    content = bytearray()
    for file in files:
        content += file.read_bytes().removeprefix(BOM_UTF8)
        if corpus == "stdlib" and len(content) >= _STDLIB_BYTES:
            break
    return torch.frombuffer(content, dtype=torch.uint8)


def stdlib_files() -> list[Path]:
    """Returns the sources of Python's standard library, without tests, in a fixed order.

    All ranks must have the same version of Python.
    """
    root = Path(sysconfig.get_path("stdlib", vars={"base": sysconfig.get_config_var("installed_base")}))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [file for file in root.rglob("*.py") if skipped.isdisjoint(file.relative_to(root).parts)]
    if not files:
        raise DataError(f"corpus stdlib: no Python sources under {root}; name text files of your own as the corpus")
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _matching(pattern: str) -> list[Path]:
    if Path(pattern).expanduser().is_dir():
        raise DataError(f'corpus {pattern}: a folder; name its files, for example "{pattern.rstrip("/")}/**/*.txt"')
    files = [file for file in documents.matching(pattern) if file.is_file()]
    if not files:
        raise DataError(f"corpus {pattern}: no such file (searched from {Path.cwd()})")
    if binary := next((file for file in files if b"\0" in _head(file)), None):
        raise DataError(
            f"corpus {binary}: has NUL bytes, so it is not text; unpack it, or convert it from UTF-16 to UTF-8"
        )
    return files


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_HEAD)


def synthetic(size: int) -> Tensor:
    """Returns ``size`` bytes of made-up words, some frequent: quick to learn, and the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 9, (512,), generator=generator).tolist()
    words = [bytes(torch.randint(97, 123, (n,), generator=generator).tolist()) + b" " for n in lengths]
    choice = (torch.rand(size // 3, generator=generator) ** 3 * len(words)).long()
    ends = torch.tensor([*map(len, words)])[choice].cumsum(0)
    needed = choice[: int((ends < size).sum()) + 1].tolist()
    return torch.from_numpy(np.frombuffer(b"".join(map(words.__getitem__, needed)), np.uint8)[:size].copy())

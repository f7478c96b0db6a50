"""Tokenises a corpus once into memory-mapped files, in a folder named after a digest of all that they depend on.

A folder is written under a temporary name and renamed when complete, so a killed process leaves nothing that looks
complete. Documents are written one by one, so memory does not depend on the corpus size.

``tokens``: int32; a token that the loss ignores is stored as its complement, which is negative. ``pieces``: int64
pairs, first token and length of a piece. ``rows``: int64, number of pieces up to the end of each row. With
``concatenate`` the last two are empty.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import psutil

from dsframe.data import documents
from dsframe.data.documents import Row
from dsframe.data.files import data_root, writing
from dsframe.errors import DataError
from dsframe.text import Say

FORM = 5
"""Version of the file format; part of the digest."""
SAY_SECONDS = 5.0
_OPEN_ROWS = 64
"""Rows that are open at a time; a document goes into the one with the least sufficient room."""
_CHARACTERS, _DOCUMENTS = 1 << 20, 1024
"""Largest batch for the tokenizer."""


class Encoder(Protocol):
    """Converts rows to tokens."""

    columns: Sequence[str]
    whole: bool
    """True if a document is truncated after ``context`` tokens, False if the rest becomes more rows."""

    dated: bool
    """True if tokens would depend on the current date, which is therefore withheld."""

    warnings: Sequence[str]
    """What of the rows that were encoded is ignored."""

    def length(self, row: Row) -> int:
        """Returns the approximate number of characters. Raises DataError if the row is unusable."""
        ...

    def encode(self, rows: list[Row]) -> Iterator[Any]:
        """Yields an int32 array per row; tokens that are not learned are complements."""
        ...


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the content of the files."""

    sources: tuple[Path, ...]
    encoder: Encoder
    packing: str
    """``concatenate``, ``rows`` or ``documents``."""
    context: int
    vocabulary: int
    """Upper bound of the tokens, exclusive."""
    digest: str
    """Digest of the tokenizer and its use."""
    data_dir: str | None
    name: str
    """``train`` or ``eval``, for messages."""

    def folder(self) -> Path:
        """Returns the folder of the files. Reads the sources unless their digest is cached. Raises DataError."""
        content = documents.digest(self.sources, self.data_dir)
        size = self.context if self.packing != "concatenate" or self.encoder.whole else 0
        key = f"{FORM}\0{content}\0{self.digest}\0{self.packing}\0{size}"
        return data_root(self.data_dir) / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:24]


@dataclass
class Counts:
    """Statistics of the documents."""

    documents: int = 0
    empty: int = 0
    """Documents without a character, left out."""
    tokens: int = 0
    """Tokens in the file."""
    learned: int = 0
    """Targets of the loss."""
    rows: int = 0
    positions: int = 0
    """Tokens that the model sees in an epoch, without padding."""
    long: int = 0
    """Documents longer than a row."""
    cut: int = 0
    """Tokens that were truncated."""
    dropped: int = 0
    """Documents without a target, left out."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each file."""
    warnings: list[str] = field(default_factory=list)
    """Of the encoder, kept to be said at every start."""

    def sentences(self, recipe: Recipe) -> Iterator[str]:
        """Yields the lines to print at every start."""
        rows = "" if recipe.packing == "concatenate" else f" in {self.rows:,} rows"
        yield f"{recipe.name}: {self.documents:,} documents, {self.tokens:,} tokens{rows}, {self.learned:,} of them targets"
        yield from (f"warning: {text}" for text in self.warnings)
        if self.empty:
            yield f"{recipe.name}: {self.empty:,} documents are empty and were left out"
        if self.long and recipe.encoder.whole:
            yield f"{recipe.name}: {self.long:,} documents are longer than context {recipe.context}: {self.cut:,} tokens were cut"
        elif self.long:
            yield f"{recipe.name}: {self.long:,} documents are longer than context {recipe.context}: each became several rows"
        if self.dropped:
            yield f"{recipe.name}: {self.dropped:,} documents have no target within context {recipe.context} and were left out"


@dataclass(frozen=True)
class Tokenised:
    """The memory-mapped files of a recipe."""

    counts: Counts
    tokens: Any
    pieces: Any
    rows: Any


def find_tokens(recipe: Recipe) -> Tokenised | None:
    """Returns the files; None if missing or incomplete. Raises DataError."""
    return _opened(recipe.folder())


def _opened(folder: Path) -> Tokenised | None:
    try:
        counts = Counts(**json.loads((folder / "counts.json").read_text()))
        if any((folder / name).stat().st_size != size for name, size in counts.sizes.items()):
            return None
        mapped = [_mapped(folder / name, dtype) for name, dtype in _FILES.items()]
    except (OSError, ValueError, TypeError):
        return None
    return Tokenised(counts, mapped[0], mapped[1].reshape(-1, 2), mapped[2])


def make(recipe: Recipe, say: Say) -> None:
    """Writes the files unless they exist. Safe for concurrent processes. Raises DataError."""
    folder = recipe.folder()
    if _opened(folder) is not None:
        return
    partial = folder.parent / f".{folder.name}.{socket.gethostname()}.{os.getpid()}.partial"
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            counts = _Writer(recipe, partial, say).write()
            (partial / "counts.json").write_text(json.dumps(asdict(counts)))
            _sync(partial)
            if recipe.folder() != folder:
                raise DataError(
                    f"{recipe.name}: a file changed while it was read; start again when no program writes to it"
                )
            if _opened(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)  # a damaged one
                with contextlib.suppress(FileExistsError):  # another process was first
                    partial.rename(folder)
                _sync(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    if _opened(folder) is None:
        raise DataError(f"{folder} cannot be read after it was written; remove it, or set data_dir")


_FILES = {"tokens": np.int32, "pieces": np.int64, "rows": np.int64}


def _mapped(path: Path, dtype: Any) -> Any:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="c")  # copy on write: torch warns about read-only arrays


def _sync(folder: Path) -> None:
    """Syncs the files to disk, so that a power failure leaves no complete name with unwritten data."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _clean(folder: Path) -> None:
    """Removes what killed processes of this node left of this folder."""
    for path in folder.parent.glob(f".{folder.name}.*.partial"):
        host, number = path.name[len(folder.name) + 2 : -len(".partial")].rsplit(".", 1)
        if host == socket.gethostname() and not psutil.pid_exists(int(number)):
            shutil.rmtree(path, ignore_errors=True)


class _Writer:
    """Writes the three files in one pass."""

    def __init__(self, recipe: Recipe, folder: Path, say: Say) -> None:
        self._recipe, self._folder, self._say = recipe, folder, say
        self._counts = Counts()
        self._began = self._said = time.monotonic()
        self._out: dict[str, IO[bytes]] = {}
        # Open rows: room, number, pieces; sorted by room.
        self._open: list[tuple[int, int, list[tuple[int, int]]]] = []
        self._opened = 0

    def write(self) -> Counts:
        recipe, counts = self._recipe, self._counts
        with contextlib.ExitStack() as files:
            for name in _FILES:
                self._out[name] = files.enter_context((self._folder / name).open("wb"))
            for number, source in enumerate(recipe.sources, 1):
                before = counts.documents + counts.empty + counts.dropped
                self._source(source, f"file {number} of {len(recipe.sources)}")
                if counts.documents + counts.empty + counts.dropped == before:
                    raise DataError(f"{source}: empty: there is no document in it")
            for _, _, pieces in sorted(self._open, key=lambda entry: entry[1]):
                self._row(pieces)
            if not counts.learned:
                why = "no document has a target" if counts.dropped else "all documents are empty"
                raise DataError(f"{recipe.name}: nothing to learn from: {why}")
            if recipe.packing == "concatenate":
                counts.rows, counts.positions = counts.tokens // recipe.context, counts.tokens
            counts.sizes = {name: out.tell() for name, out in self._out.items()}
            counts.warnings = [*recipe.encoder.warnings]
        return counts

    def _source(self, source: Path, label: str) -> None:
        recipe, counts = self._recipe, self._counts
        start, learned = counts.tokens, 0
        for batch in _batches(documents.rows(source, recipe.encoder.columns), recipe.encoder):
            self._progress(label)
            for row, encoded in zip(batch, recipe.encoder.encode(batch), strict=True):
                tokens = encoded
                self._check(row, tokens)
                if recipe.encoder.whole and len(tokens) > recipe.context + 1:
                    counts.long += 1
                    counts.cut += len(tokens) - recipe.context - 1
                    tokens = tokens[: recipe.context + 1]
                if recipe.encoder.whole and not (tokens[1:] >= 0).any():
                    counts.dropped += 1
                    continue
                if not len(tokens):
                    counts.empty += row.last
                    continue
                # The first token of a document is no target, unless documents are joined.
                targets = tokens if recipe.packing == "concatenate" or counts.tokens > start else tokens[1:]
                learned += int((targets >= 0).sum())
                self._out["tokens"].write(tokens.tobytes())
                counts.tokens += len(tokens)
                if row.last:
                    counts.documents += 1
                    counts.learned += learned
                    self._add_document(start, counts.tokens - start)
                    start, learned = counts.tokens, 0

    def _check(self, row: Row, tokens: Any) -> None:
        if len(tokens) and (largest := int(np.maximum(tokens, ~tokens).max())) >= self._recipe.vocabulary:
            raise DataError(
                f"{row.place}: token {largest} is beyond the model's vocabulary of {self._recipe.vocabulary:,}; "
                "choose the tokenizer of this model, or raise vocab_size"
            )

    def _add_document(self, start: int, length: int) -> None:
        """Records where a document lies. A long one becomes several rows, in which each target occurs once."""
        recipe = self._recipe
        if recipe.packing == "concatenate":
            return
        size = recipe.context
        if length > size + 1:
            self._counts.long += 1
        for first in range(0, length - 1, size):
            piece = start + first, min(size + 1, length - first)
            self._row([piece]) if recipe.packing == "rows" else self._fit(piece)

    def _fit(self, piece: tuple[int, int]) -> None:
        """Adds the piece to the open row with the least sufficient room."""
        needed = piece[1] - 1
        at = bisect.bisect_left(self._open, (needed, -1))
        if at < len(self._open):
            room, number, pieces = self._open.pop(at)
        else:
            room, number, pieces = self._recipe.context, self._opened, []
            self._opened += 1
        pieces.append(piece)
        if room == needed:
            self._row(pieces)
            return
        bisect.insort(self._open, (room - needed, number, pieces))
        if len(self._open) > _OPEN_ROWS:
            self._row(self._open.pop(0)[2])  # the fullest

    def _row(self, pieces: list[tuple[int, int]]) -> None:
        self._out["pieces"].write(np.asarray(pieces, np.int64).tobytes())
        end = self._out["pieces"].tell() // 16
        self._out["rows"].write(np.int64(end).tobytes())
        self._counts.rows += 1
        self._counts.positions += sum(length - 1 for _, length in pieces)

    def _progress(self, label: str) -> None:
        now = time.monotonic()
        if now - self._said > SAY_SECONDS:
            self._said, counts = now, self._counts
            rate = counts.tokens / (now - self._began)
            self._say(
                f"tokenising {self._recipe.name}, {label}: {counts.documents:,} documents, {counts.tokens:,} tokens, {rate:,.0f}/s"
            )


def _batches(rows: Iterable[Row], encoder: Encoder) -> Iterator[list[Row]]:
    """Yields batches of rows that are worth a call of the tokenizer."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += encoder.length(row)
        if size >= _CHARACTERS or len(batch) == _DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

"""Data sets of every kind for tests, in which each sample tells its number: rows ``(number, number)``, or dicts with ``labels``."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from dsframe.data import Mixture, Pad, Shards, TensorSource

SAMPLES = 90


def tar(path: Path, numbers: range, **more: bytes) -> Path:
    """A shard as webdataset writes it: each sample a text, its number, and a vector."""
    import numpy as np

    with tarfile.open(path, "w") as out:
        for number in numbers:
            vector = io.BytesIO()
            np.save(vector, np.arange(3) + number)
            parts = {"txt": f"é {number}".encode(), "cls": str(number).encode(), "npy": vector.getvalue(), **more}
            for suffix, content in parts.items():
                member = tarfile.TarInfo(f"some/{number:04}.{suffix}")
                member.size = len(content)
                out.addfile(member, io.BytesIO(content))
    return path


def lines(path: Path, numbers: range) -> Path:
    """JSON lines, packed as the name says; one line in between is empty."""
    import gzip

    text = "\n\n".join(json.dumps({"number": number}) for number in numbers).encode() + b"\n"
    if path.suffix == ".zst":
        import pyarrow as arrow

        with arrow.output_stream(str(path), compression="zstd") as out:
            out.write(text)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def shards(folder: Path, **options: Any) -> Shards:
    """90 samples in four files of different sizes, read as pairs of numbers."""
    for number, (first, last) in enumerate(((0, 13), (13, 45), (45, 46), (46, 90))):
        path = folder / f"part-{number}.tar"
        if not path.exists():
            tar(path, range(first, last))
    return Shards(str(folder / "part-*.tar"), _pair, **{"window": 16, "data_dir": str(folder), **options})


def _pair(row: dict[str, Any]) -> tuple[Any, int]:
    number = row["cls"] if "cls" in row else row["number"]
    if "npy" in row:
        assert row["npy"].tolist() == [number, number + 1, number + 2]
        assert (row["__key__"], row["txt"]) == (f"some/{number:04}", f"é {number}")
    return torch.tensor([float(number), float(torch.rand(()))]), number


class Pairs(Dataset[Any]):
    """``(number and a draw, number)``."""

    def __init__(self, samples: int = SAMPLES, first: int = 0) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return _pair({"number": index + self.first})


class Dicts(Pairs):
    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [index] * (index % 7 + 1), "labels": index}


class Stream(IterableDataset[Any]):
    """As long as it likes, shuffled by torch's generator."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(self.samples).tolist():
            yield _pair({"number": index + self.samples * self.epoch})


def mixture(folder: Path) -> Mixture:
    return Mixture(
        {"pairs": Pairs(31), "tar": shards(folder), "more": Pairs(20, 1000)},
        {"pairs": 0.5, "tar": 0.3, "more": 0.2},
    )


def of_sources() -> Mixture:
    """Sources that make whole batches."""
    return Mixture(
        {name: TensorSource(*[torch.arange(size) + first] * 2) for name, size, first in (("a", 50, 0), ("b", 40, 50))}
    )


SOURCES: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "pairs": (lambda folder: Pairs(), None),
    "dict rows": (lambda folder: Dicts(), Pad(multiple=8)),
    "tar": (lambda folder: shards(folder), None),
    "mixture": (mixture, None),
    "mixture of sources": (lambda folder: of_sources(), None),
    "iterable": (lambda folder: Stream(), None),
}
"""What makes the data in a folder, and their collate."""

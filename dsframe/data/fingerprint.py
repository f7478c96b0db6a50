"""Digests of a few samples, to compare data between ranks and with the run that saved a checkpoint.

The number of samples is not enough: ``list(set(...))`` is ordered differently in each process, a file listing on each
node, and files change. Reads only the first, middle and last sample and two of the first training batch, in a second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only
from torch.utils.data import TensorDataset
from xxhash import xxh3_64

from dsframe.cluster.exchange import Ranks, all_gather_json, by_value, numbered
from dsframe.data.datasets import StreamSource
from dsframe.data.loader import EvaluationLoader, Loader
from dsframe.data.source import Batch
from dsframe.errors import DataError
from dsframe.values import tensors_of

BUDGET_SECONDS = 1.0
"""No further row is read after this time, except the first."""
_MAX_BYTES = 1 << 28
"""Largest size of tensors in memory that are digested: a tenth of a second."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_READINGS = 16
"""A sample that is randomly flipped looks the same in this many readings once in 65,536 runs."""


def assert_same_samples(ranks: Ranks, loader: Loader | EvaluationLoader) -> dict[str, str]:
    """**Collective.** Returns digests of a few samples, by index. Raises DataError if ranks have different samples.

    Samples that change with each reading have no digest: only their structure is compared, and {} is returned. Tensors
    in memory, and files, have one digest of all samples. May draw random numbers, if the data do.
    """
    chosen = _chosen(loader)
    twice = [] if isinstance(loader.source, StreamSource) else chosen[:1]
    read = [(str(index), digest(row)) for index, row in _rows(loader, twice + chosen)]
    digests, moves = dict(read), bool(twice) and len(read) > 1 and read[0] != read[1]
    answers = all_gather_json(ranks, [digests, moves, _of_all(loader.source)])
    of_ranks, wholes = [digests_there for digests_there, _, _ in answers], [whole for _, _, whole in answers]
    common = [index for index in of_ranks[0] if all(index in digests_there for digests_there in of_ranks)]
    index = next((index for index in common if len({digests_there[index] for digests_there in of_ranks}) > 1), None)
    if index is None:
        if any(moves_there for _, moves_there, _ in answers):
            return {}
        if others := [rank for rank, whole in enumerate(wholes) if whole != wholes[0]]:
            raise _differ(loader, "a sample", others)
        return {**{name: digests[name] for name in common}, **wholes[0]}
    rows = [row for _, row in _rows(loader, [int(index)] * _READINGS)]
    again = {"random": len({digests[index], *map(digest, rows)}) > 1, "kind": _structure(rows[0])}
    readings = all_gather_json(ranks, again)
    structures = [reading["kind"] for reading in readings]
    if any(reading["random"] for reading in readings) and len(set(structures)) == 1:
        return {}
    others = [rank for rank, digests_there in enumerate(of_ranks) if digests_there[index] != of_ranks[0][index]]
    detail = f": {by_value(structures)}" if len(set(structures)) > 1 else ""
    raise _differ(loader, f"sample {index}, counted from 0,", others, detail)


def _differ(loader: Loader | EvaluationLoader, sample: str, others: list[int], detail: str = "") -> DataError:
    data_name = "training" if isinstance(loader, Loader) else "evaluation"
    return DataError(
        f"the {data_name} data differ between ranks: {sample} is another one on {numbered(others)} than on rank 0{detail}. "
        "Every rank needs the same samples in the same order: sort what comes out of a set or from a listing of files, seed "
        "what is drawn, and give every host the same files"
    )


def _of_all(source: Any) -> dict[str, str]:
    """Returns a digest of all samples, if they are small tensors in memory or read from files (``digest_of_files``)."""
    data = getattr(source, "dataset", source)
    text, is_ours = getattr(data, "digest_of_files", ""), type(data).__module__.startswith("dsframe.data.")
    tensors = tensors_of(list(vars(data).values())) if not text and (is_ours or type(data) is TensorDataset) else []
    if tensors and sum(tensor.nbytes for tensor in tensors) <= _MAX_BYTES:
        text = digest(tensors)
    return {"(which one is unknown)": text} if text else {}


def digest(row: Any) -> str:
    """Returns a digest of names, types, shapes and values; of objects, such as graphs, repr and inner tensors."""
    hasher = xxh3_64()
    _update(hasher, row, 3)
    return hasher.hexdigest()


def _update(hasher: xxh3_64, row: Any, depth: int, *, all_values: bool = True) -> None:
    # The repr of a nested tensor contains a running number.
    row = tree_map_only(Tensor, lambda leaf: list(leaf.unbind()) if leaf.is_nested else leaf, row)
    for path, leaf in tree_leaves_with_path(row):
        hasher.update(keystr(path).encode())
        content = _bytes(leaf)
        if content is not None:
            hasher.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
            hasher.update(content)
        else:
            if all_values:
                hasher.update(_ADDRESS.sub("", repr(leaf)).encode())
            if depth and not isinstance(leaf, (type, Tensor)) and (inside := getattr(leaf, "__dict__", None)):
                _update(hasher, dict(inside), depth - 1, all_values=False)


def _bytes(leaf: Any) -> bytes | memoryview | None:
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
        data: memoryview = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        return data
    return leaf.tobytes() if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject else None


def _structure(row: Batch) -> str:
    """Returns names, types and numbers of dimensions, but no sizes, which may be random."""
    return "; ".join(
        f"{keystr(path)} {f'{leaf.dtype}, {leaf.ndim} dimensions' if isinstance(leaf, Tensor) else type(leaf).__name__}"
        for path, leaf in tree_leaves_with_path(row)
    )


def _chosen(loader: Loader | EvaluationLoader) -> list[int]:
    if isinstance(loader.source, StreamSource):
        return [0, 1]
    last = len(loader.source) - 1
    first_batch = loader.sampler.global_batch(0)[0][1][:2].tolist() if isinstance(loader, Loader) else []
    return list(dict.fromkeys([0, last // 2, last, *first_batch]))


def _rows(loader: Loader | EvaluationLoader, indices: list[int]) -> Iterator[tuple[int, Batch]]:
    until = time.monotonic() + BUDGET_SECONDS
    for index, row in zip(indices, loader.rows(indices), strict=False):
        yield index, row
        if time.monotonic() > until:
            return

"""Reads a checkpoint: each tensor, or a range of it, from the position in the manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsframe.checkpoint import store
from dsframe.checkpoint.layout import DTYPES, buffers_of
from dsframe.errors import CheckpointError
from dsframe.model.state import WEIGHT, LossScaleState, ParameterState, Shapes, narrowed
from dsframe.text import Json, one_line
from dsframe.values import Tensors

RNG = "rng.json"
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Checkpoint:
    """A checkpoint on disk, as a :class:`dsframe.model.state.SavedState`. Files are mapped and read on use."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        """Reads only the manifest. ``rank``: whose buffers are read, if ranks had different ones.

        Raises CheckpointError if the manifest is missing or damaged; ``store.verify`` checks the rest.
        """
        self.path, self.rank = path, rank
        self.manifest = store.read_manifest(path)
        self._parameters: Mapping[str, Json] = self.manifest["parameters"]
        self._mapped: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """Number of global batches trained on."""
        return int(self.manifest["step"])

    @property
    def updates(self) -> int:
        """Number of optimizer updates; fewer than steps if fp16 gradients overflowed."""
        return int(self.manifest["updates"])

    @property
    def loss_scale(self) -> LossScaleState | None:
        """The state of dynamic loss scaling."""
        kept = self.manifest["loss_scale"]
        return None if kept is None else LossScaleState(**kept)

    @property
    def shapes(self) -> Shapes:
        """Every parameter's full shape."""
        return {name: tuple(entry["tensors"][WEIGHT]["shape"]) for name, entry in self._parameters.items()}

    def moments(self, name: str) -> list[str]:
        """Returns the keys of a parameter's optimizer state, sorted."""
        return sorted(self._parameters[name]["tensors"].keys() - {WEIGHT})

    def keeps(self, key: str) -> bool:
        """Returns whether the optimizer state has tensors with this key."""
        return any(key in entry["tensors"] for entry in self._parameters.values())

    @property
    def resized(self) -> Collection[str]:
        """Names of buffers whose shape changed during training."""
        return frozenset(self.manifest.get("resized", ()))

    def buffers(self) -> Tensors:
        """Returns the model's buffers: this rank's, if it had different ones, else rank 0's."""
        of_ranks = self.manifest["buffers"]
        kept = of_ranks.get(buffers_of(self.rank)) or of_ranks.get(buffers_of(0), {})
        return {name: self._tensor(entry) for name, entry in kept.items()}

    def parameter(self, name: str) -> ParameterState:
        """Returns one parameter, in fp32, on the CPU. Raises CheckpointError if a file is not as the manifest says."""
        entry = self._parameters[name]
        moments = {key: self._tensor(entry["tensors"][key]) for key in self.moments(name)}
        return ParameterState(name, self._tensor(entry["tensors"][WEIGHT]), moments, dict(entry["scalars"]))

    def part(self, name: str, first: int, size: int) -> ParameterState:
        """Returns a range of one flattened parameter; reads nothing else.

        Raises CheckpointError as :meth:`parameter`, and if a moment has another shape than the weight.
        """
        entry = self._parameters[name]
        if len({tuple(tensor["shape"]) for tensor in entry["tensors"].values()}) > 1:
            return narrowed(self.parameter(name), first, size)  # raises the error
        parts = {key: self._range(tensor, first, size) for key, tensor in entry["tensors"].items()}
        weight = parts.pop(WEIGHT)
        return ParameterState(name, weight, dict(sorted(parts.items())), dict(entry["scalars"]))

    def weights(self, instead: str = WEIGHT) -> Iterator[tuple[str, Tensor]]:
        """Yields parameters, then buffers, one at a time, as in the model's ``state_dict``.

        ``instead``: use the optimizer's tensors with this key in place of the weights, if there are any.
        """
        for name, entry in self._parameters.items():
            yield name, self._tensor(entry["tensors"].get(instead) or entry["tensors"][WEIGHT])
        yield from self.buffers().items()

    def generators(self) -> list[Json]:
        """Returns the random generators of every rank that saved. Raises CheckpointError if they cannot be read."""
        try:
            kept: list[Json] = json.loads((self.path / RNG).read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}/{RNG}: {error}") from None
        return kept

    def close(self) -> None:
        """Closes the files; tensors that were read keep their mappings."""
        self._mapped = {}

    def _tensor(self, entry: Json) -> Tensor:
        return self._range(entry, 0, math.prod(entry["shape"])).view(entry["shape"])

    def _range(self, entry: Json, first: int, size: int) -> Tensor:
        """Returns elements of one tensor; a view of the mapped file if they are contiguous."""
        dtype, parts, start = _DTYPES[entry["dtype"]], [], 0
        for file, begin, count in entry["pieces"]:
            low, high = max(first, start) - start, min(first + size, start + count) - start
            if low < high:
                width = dtype.itemsize
                bytes_of = self._file(file)[begin + low * width : begin + high * width]
                parts.append(torch.empty(0, dtype=dtype).set_(bytes_of))
            start += count
        if not parts:
            return torch.zeros(0, dtype=dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _file(self, name: str) -> Any:
        if name not in self._mapped:
            path, size = self.path / name, self.manifest["files"][name]["bytes"]
            try:
                if (actual := path.stat().st_size) != size:  # access beyond the end of the file would kill the process
                    raise CheckpointError(f"{path} has {actual:,} bytes instead of {size:,}")
                self._mapped[name] = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"{path}: {one_line(error)}") from None
        return self._mapped[name]

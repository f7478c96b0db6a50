"""Digests of tensors by their names: the same in any number format that holds their values."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping

import torch
import xxhash
from torch import Tensor


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest of tensors by their names, which this process has whole: of their values as float32."""
    return combined({name: digest_of_one(tensor) for name, tensor in tensors.items()})


def digest_of_one(parameter: Tensor) -> str:
    """The digest of its shape and of its values as float32."""
    state = xxhash.xxh3_128()
    for piece in _pieces(parameter.detach()):
        state.update(piece.to("cpu", torch.float32).contiguous().view(torch.uint8).numpy().data)
    return f"{list(parameter.shape)} {state.hexdigest()}"


def flat_copy(tensor: Tensor) -> Tensor:
    """A copy of its elements on the CPU. Of its own memory NumPy is to see nothing: torch never resizes what NumPy has seen."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)


def _pieces(tensor: Tensor, elements: int = 1 << 22) -> Iterator[Tensor]:
    yield from torch.split(tensor.reshape(-1), elements)


def combined(digests: Mapping[str, str]) -> str:
    """One digest of those of tensors, by their names."""
    lines = (f"{_without_wrappers(name)} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _without_wrappers(name: str) -> str:
    """The name in the model without an adapter: which layers have one does not make another base."""
    return re.sub(r"\.(base_layer|original_module)\.", ".", name)

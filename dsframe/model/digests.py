"""Digests of tensors by name: the same in any dtype that represents their values exactly."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the digest of complete tensors by name, from their values as float32."""
    return combined({name: digest_of_one(tensor) for name, tensor in tensors.items()})


def digest_of_one(parameter: Tensor) -> str:
    """Returns the digest of the parameter's shape and its values as float32."""
    state = xxhash.xxh3_128()
    for piece in torch.split(parameter.detach().reshape(-1), 1 << 22):
        state.update(piece.to("cpu", torch.float32).contiguous().view(torch.uint8).numpy().data)
    return f"{list(parameter.shape)} {state.hexdigest()}"


def flat_copy(tensor: Tensor) -> Tensor:
    """Returns a flat copy on the CPU. NumPy must not see a tensor's own memory, because torch then never resizes it."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)


def combined(digests: Mapping[str, str]) -> str:
    """Returns one digest of the ``digests`` of tensors by name."""
    # Without an adapter's wrappers: the base's digest does not depend on which layers have one.
    lines = (re.sub(r"\.(base_layer|original_module)\.", ".", name) + f" {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]

"""The random generators of one process: torch on the CPU and on this rank's GPU, NumPy, Python."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_CPU = torch.device("cpu")


def seed(number: int, *, gpus: bool = True) -> None:
    """Seeds every generator of this process. ``gpus``: include those of GPUs, which data readers do not seed."""
    random.seed(number)
    np.random.seed(number % 2**32)
    if gpus:
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@contextmanager
def kept(device: torch.device = _CPU) -> Iterator[None]:
    """Restores every generator at exit, including the GPU's if ``device`` is one."""
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)


def capture(device: torch.device) -> dict[str, Any]:
    """Returns the state of every generator of this process as JSON values; about 14 kB."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    return {
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "cuda": _text(torch.cuda.get_rng_state(device).numpy().tobytes()) if device.type == "cuda" else None,
        "numpy": [
            str(name),
            _text(np.asarray(keys, np.uint32).tobytes()),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "python": [version, _text(np.asarray(words, np.uint32).tobytes()), gauss],
    }


def restore(kept: dict[str, Any], device: torch.device) -> None:
    """Restores every generator's captured state. A GPU's is unchanged if the checkpoint has none."""
    torch.set_rng_state(_tensor(kept["torch"]))
    if device.type == "cuda" and kept["cuda"] is not None:
        torch.cuda.set_rng_state(_tensor(kept["cuda"]), device)
    name, keys, position, has_gauss, cached = kept["numpy"]
    np.random.set_state((name, np.frombuffer(base64.b64decode(keys), np.uint32), position, has_gauss, cached))
    version, words, gauss = kept["python"]
    random.setstate((version, tuple(np.frombuffer(base64.b64decode(words), np.uint32).tolist()), gauss))


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

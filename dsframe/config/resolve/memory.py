"""Bytes of parameters, gradients and optimizer state on one rank (ZeRO paper, table 1).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020: with 16-bit training
each parameter costs 2 bytes, its gradient 2, and the optimizer K = 12 (Adam: fp32 weight and two moments).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsframe.config.schema.deepspeed import DeepSpeed

_UNITS = {"": 1, "b": 1} | {f"{letter}b": 1000**n for n, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", 1)}
_MOMENTS = dict.fromkeys(("adam", "adamw", "lamb", "adamax", "nadam", "radam", "adadelta"), 2)


def parse(text: str) -> int:
    """Returns the bytes of a size such as ``80GB`` or ``24GiB``.

    Raises:
        ValueError: it is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f'"{text}" is not a size of memory; write for example 80GB or 24GiB')
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if not match[2] and size < 1_000_000:
        raise ValueError(f"{text} bytes of memory? Write {text.strip()}GB")
    return size


@dataclass(frozen=True)
class Cost:
    """Bytes per parameter on one rank."""

    parameter: float
    gradient: float
    optimizer: float
    host: float = 0.0
    """Bytes in host memory."""

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return self.parameter + self.gradient + self.optimizer


def moments(file: DeepSpeed) -> int:
    """Returns how many fp32 numbers the optimizer keeps for each parameter."""
    name = file.optimizer.type.lower() if file.optimizer else "adamw"
    plain = name == "sgd" and not (file.optimizer and file.optimizer.params.get("momentum"))
    return _MOMENTS.get(name, 0 if plain else 1)


def count(number: float) -> str:
    """Returns a number in words: ``7.5 billion``."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"

"""How large a model may be: bytes of parameters, gradients and optimizer state on one rank (ZeRO paper, table 1).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020: with 16-bit training each
parameter costs 2 bytes, its gradient 2, and the optimizer K = 12 (Adam: fp32 weight and two moments).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.errors import Problem

_UNITS = {"": 1, "b": 1} | {f"{letter}b": 1000**n for n, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", 1)}
_MOMENTS = dict.fromkeys(("adam", "adamw", "lamb", "muadam", "muadamw", "adamax", "nadam", "radam", "adadelta"), 2)


def parse(text: str) -> int:
    """Bytes in a size such as ``80GB`` or ``24GiB``.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f'"{text}" is not a size of memory; write for example 80GB or 24GiB')
    return int(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True)
class Cost:
    """Bytes of one parameter on one rank's device."""

    parameter: float
    gradient: float
    optimizer: float
    host: float = 0.0
    """In the memory of the rank's host."""

    @property
    def total(self) -> float:
        """On the device."""
        return self.parameter + self.gradient + self.optimizer


@dataclass(frozen=True)
class SetUp:
    """Bytes of one parameter on one rank while the model is built, sharded and handed to the engine."""

    device: float
    host: float
    """In the memory of the rank's host."""
    disk: float
    """In files of the rank's host, which are gone when the set-up ends."""


def moments(file: DeepSpeed) -> int:
    """fp32 numbers that the optimizer keeps for each parameter."""
    name = file.optimizer.type.lower() if file.optimizer else "adamw"
    if file.optimizer and name == "lbfgs":
        return 2 * int(file.optimizer.params.get("history_size", 100)) + 2  # updates, a direction and a gradient
    plain = name == "sgd" and not (file.optimizer and file.optimizer.params.get("momentum"))
    return _MOMENTS.get(name, 0 if plain else 1)


def note(per_parameter: Cost, setup: SetUp, world_size: int, limit: int, label: str) -> Problem:
    """Returns what fits into ``limit`` bytes; a warning where the set-up takes more of a device than the training."""
    processes, memory, most = f"{world_size} process{'es' * (world_size > 1)}", gigabytes(limit), per_parameter.total
    builds = (
        f"the set-up takes {setup.device:.3g} bytes of the device, {setup.host:.3g} of the host and {setup.disk:.3g} "
        "on its disk for each parameter and rank"
    )
    if setup.device > most:
        message = f"{memory} hold the set-up of at most {count(limit / setup.device)} parameters on {processes}"
        remedy = "take devices with more memory, or an engine or stage that never has the whole model on a device"
        return Problem("warning", "", f"{message}: {builds}, training {most:.3g}", remedy, label, code="memory")
    message = f"parameters, gradients and optimizer state are offloaded: all {memory} are free for activations"
    if most:
        message = (
            f"{memory} hold parameters ({per_parameter.parameter:.3g} bytes each), gradients "
            f"({per_parameter.gradient:.3g}) and optimizer state ({per_parameter.optimizer:.3g}) of at most "
            f"{count(limit / most)} parameters on {processes}; activations and buffers come on top"
        )
    return Problem("note", "", f"{message}; {builds}", "", label, code="memory")


def gigabytes(size: float) -> str:
    """``80 GB``."""
    return f"{size / 1e9:g} GB"


def count(number: float) -> str:
    """``7.5 billion``."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"

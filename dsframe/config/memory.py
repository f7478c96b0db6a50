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
_MOMENTS = {
    "adam": 2,
    "adamw": 2,
    "lamb": 2,
    "muadam": 2,
    "muadamw": 2,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "adadelta": 2,
}


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


def cost(file: DeepSpeed, world_size: int, engine: str = "deepspeed") -> Cost:
    """Bytes on the device for each parameter of the model, from the end of a backward pass to the update.

    Of a model that is cut evenly among the ranks that share one. ``python -m tests.footprint`` measures them.
    """
    stages = file.pipeline.stages if engine in ("deepspeed", "reference-model-parallel") else 1
    model_ranks = stages * (max(1, file.tensor_parallel.autotp_size) if engine == "deepspeed" else 1)
    one = held(file, max(1, world_size // model_ranks), engine)
    return Cost(*(value / model_ranks for value in (one.parameter, one.gradient, one.optimizer, one.host)))


def moments(file: DeepSpeed) -> int:
    """fp32 numbers that the optimizer keeps for each parameter."""
    kind = file.optimizer.type.lower() if file.optimizer else "adamw"
    return _MOMENTS.get(
        kind, 0 if kind == "sgd" and not (file.optimizer and file.optimizer.params.get("momentum")) else 1
    )


def held(file: DeepSpeed, ranks: int, engine: str = "deepspeed") -> Cost:
    """Bytes of each parameter that a rank's pipeline stage and tensor slice hold, among ``ranks`` data-parallel ones.

    In fp32 DeepSpeed's stages 1 to 3 keep a copy of the weights to update, so that K is 12 there too (deepspeed 0.19.8,
    ``runtime/zero/stage_1_and_2.py``: single_partition_of_fp32_groups; ``stage3.py``: fp32_partitioned_groups_flat), where a
    plain optimizer has 8. FSDP computes in 16 bits from fp32 shares, and has no copy. Other engines keep full replicas, whose
    16-bit gradients become fp32 before the update.
    """
    zero, short = file.zero_optimization, file.fp16.enabled or file.bf16.enabled
    deepspeed, fsdp = engine == "deepspeed", engine == "fsdp"
    stage = zero.stage if deepspeed else 3 if fsdp else 0
    parameter = 2.0 if short and not fsdp else 4.0
    gradient = 2.0 if short and deepspeed else 4.0
    copy = 4.0 if (short and not fsdp) or (deepspeed and stage >= 1) else 0.0
    optimizer = copy + 4.0 * moments(file)
    host = 0.0
    if stage >= 1:
        if deepspeed and (zero.optimizer_device == "cpu" or (zero.optimizer_device == "nvme" and stage < 3)):
            # with the gradients, in fp32, and a buffer in the model's own format (stage3.py: grad_partitions_flat_buffer;
            # stage_1_and_2.py: param_buffer_of_bit16_for_cpu_offload_groups)
            host = (optimizer + 4.0 + (2.0 if short else 4.0)) / ranks
        optimizer = 0.0 if deepspeed and zero.optimizer_device != "none" else optimizer / ranks
    if stage >= 2:
        gradient = 0.0 if deepspeed and zero.optimizer_device != "none" else gradient / ranks
    if stage >= 3:
        host += parameter / ranks if deepspeed and zero.parameter_device == "cpu" else 0.0
        parameter = 0.0 if deepspeed and zero.parameter_device != "none" else parameter / ranks
    return Cost(parameter, gradient, optimizer, host)


def note(file: DeepSpeed, world_size: int, limit: int, label: str, engine: str = "deepspeed") -> Problem:
    """What fits into ``limit`` bytes."""
    per_parameter = cost(file, world_size, engine)
    where = f"on {world_size} processes" if world_size > 1 else "on one process"
    if per_parameter.total == 0:
        message = f"parameters, gradients and optimizer state are offloaded: {gigabytes(limit)} are left to activations"
    else:
        most = limit / per_parameter.total
        message = (
            f"{gigabytes(limit)} hold parameters ({per_parameter.parameter:.3g} bytes each), gradients "
            f"({per_parameter.gradient:.3g}) and optimizer state ({per_parameter.optimizer:.3g}) of at most "
            f"{count(most)} parameters {where}; activations and buffers come on top"
        )
    return Problem("note", "", message, "", label, code="memory")


def gigabytes(size: float) -> str:
    """``80 GB``."""
    return f"{size / 1e9:g} GB"


def count(number: float) -> str:
    """``7.5 billion``."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"

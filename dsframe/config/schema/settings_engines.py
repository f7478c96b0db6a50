# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""Sections of the ``dsframe`` section with engine options."""

from typing import Literal

from dsframe.config.schema.base import Count, Section


class Horovod(Section):
    """Options of the Horovod engine."""

    compression: Literal["none", "fp16"] = "none"
    """Send gradients unchanged or as fp16."""


class Ddp(Section):
    """Options of the DDP engine."""

    communication: Literal["none", "fp16", "bf16"] = "none"
    """Send gradients unchanged, or rounded to and summed in 16 bits (``fp16`` ends at 65,504)."""


class Fsdp(Section):
    """Options of the FSDP engine."""

    wrap: list[str] = []
    """Module classes, by name. Each instance is gathered as a unit and freed before the next. Default: the class that
    the model repeats, as for ``activation_checkpointing``, else the most frequent class in its layer lists. A module
    that shares a parameter with another part of the model belongs to the root unit."""
    sharding: Literal["full", "hybrid"] = "full"
    """``full``: sharded over all ranks. ``hybrid``: sharded within groups of ranks; each group has a full model."""
    shard_size: Count | None = None
    """Ranks of a group, for ``hybrid``. Must divide the number of processes. Default: the ranks of a node."""
    offload: Literal["none", "cpu"] = "none"
    """``cpu``: shards of weights, gradients and optimizer state stay in host memory, and the CPU runs the update."""
    reshard_after_forward: bool = True
    """Free a unit's weights after its forward pass and gather them again for the backward pass: 1.5 times the
    communication."""

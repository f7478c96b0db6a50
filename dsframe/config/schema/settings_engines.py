# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""Sections of the ``dsframe`` section with the options of single engines."""

from typing import Literal

from dsframe.config.schema.base import Count, Section


class Horovod(Section):
    """Options of the Horovod engine."""

    compression: Literal["none", "fp16"] = "none"
    """Send gradients as they are or as fp16."""


class Ddp(Section):
    """Options of the DDP engine."""

    communication: Literal["none", "fp16", "bf16"] = "none"
    """How gradients are sent: as they are, or rounded to 16 bits and added up so (``fp16`` ends at 65,504)."""


class Fsdp(Section):
    """Options of the FSDP engine."""

    wrap: list[str] = []
    """Classes of the model, by name. Each instance is gathered as one, and given up before the next. Default: the class that
    the model repeats, as for ``activation_checkpointing``, else the one that occurs most often in its lists of layers. What shares
    a parameter with another part of the model stays with the whole model."""
    sharding: Literal["full", "hybrid"] = "full"
    """``full``: sharded over all ranks. ``hybrid``: shares within groups of ranks, and each group has a whole model."""
    shard_size: Count | None = None
    """Ranks of a group, for ``hybrid``. Divides the number of processes. Default: the ranks of a host."""
    offload: Literal["none", "cpu"] = "none"
    """``cpu``: shards of weights, gradients and optimizer state stay in the host's memory, and the CPU makes the update."""
    reshard_after_forward: bool = True
    """Free a unit's weights after its forward pass and gather them again for the backward pass: less memory, 1.5
    times the communication."""

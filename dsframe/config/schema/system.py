"""Checkpoints, activation checkpointing, asynchronous I/O, and sections that no training here uses.

Source: ``runtime/activation_checkpointing/config.py``
and ``runtime/swap_tensor/aio_config.py`` of DeepSpeed 0.19.8.
"""

from typing import Any, ClassVar

from dsframe.config.schema.base import Count, Section, Unmodelled
from dsframe.config.schema.parameters import passed


class ActivationCheckpointing(Section):
    """Settings of ``deepspeed.checkpointing``. They act only where the model calls it: no engine
    reads them. ``dsframe.model.activation_checkpointing`` recomputes blocks."""

    partition_activations: bool = False
    """Share out checkpoints over tensor-parallel ranks."""
    cpu_checkpointing: bool = False
    """Keep checkpoints in CPU memory."""
    contiguous_memory_optimization: bool = False
    """Keep checkpoints in one buffer."""
    number_checkpoints: Count | None = None
    """Checkpoints in a forward pass, for the size of the buffer."""
    synchronize_checkpoint_boundary: bool = False
    """Wait for the device at each checkpoint."""
    profile: bool = False
    """Time each checkpoint."""


class Aio(passed("Aio")):  # type: ignore[misc]  # keys from a table
    """Asynchronous I/O to NVMe."""

    nullable: ClassVar[bool] = True

    use_gds: bool = False
    """NVIDIA GPUDirect Storage. CUDA only."""


class Checkpoint(Unmodelled):
    """DeepSpeed's own checkpoints, which dsframe neither reads nor writes."""

    load_universal: bool = False
    """The checkpoint is a Universal one."""
    use_node_local_storage: bool = False
    """Each node has a file system of its own."""
    writer: dict[str, Any] | None = None
    """The fast writer. With type PYTHON, DeepSpeed 0.19.8 fails when it saves."""


class Compile(Unmodelled):
    """DeepCompile: ZeRO inside the compiled graph. No engine accepts it."""

    deepcompile: bool = False
    """Turns it on."""


class Switched(Unmodelled):
    """A section that no training here uses."""

    enabled: bool = False
    """Turns it on."""

"""DeepSpeed's activation checkpointing, asynchronous I/O, checkpoints and DeepCompile.

Source: ``runtime/activation_checkpointing/config.py`` and ``runtime/swap_tensor/aio_config.py`` of DeepSpeed 0.19.8.
"""

from typing import Any, ClassVar

from dsframe.config.schema.base import Section, Unmodelled
from dsframe.config.schema.parameters import passed


@passed
class ActivationCheckpointing(Section):
    """Settings of ``deepspeed.checkpointing``, for models that call it; no engine reads them. To recompute blocks, use
    ``dsframe.model.activation_checkpointing``."""


@passed
class Aio(Section):
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
    """Fast writer. With type PYTHON, DeepSpeed 0.19.8 fails when it saves."""


class Compile(Unmodelled):
    """DeepCompile: ZeRO inside the compiled graph. No engine accepts it."""

    deepcompile: bool = False
    """Turns it on."""

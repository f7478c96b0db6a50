"""Checkpoints, activation checkpointing, asynchronous I/O, and sections that no training here uses.

Source: ``deepspeed/runtime/model_checkpointing``, ``runtime/activation_checkpointing/config.py``
and ``runtime/swap_tensor/aio_config.py`` of DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from dsframe.config.schema.base import Count, Section, Unmodelled


class ActivationCheckpointing(Section):
    """Settings of ``deepspeed.checkpointing``. They act only where the model calls it; in dsframe, the first two act on
    the blocks that ``dsframe.model.activation_checkpointing`` names."""

    partition_activations: bool = False
    """Share out checkpoints over tensor-parallel ranks; elsewhere without effect."""
    cpu_checkpointing: bool = False
    """Keep checkpoints in CPU memory. Needs ``partition_activations``."""
    contiguous_memory_optimization: bool = False
    """Keep checkpoints in one buffer. Needs ``partition_activations`` and ``number_checkpoints``."""
    number_checkpoints: Count | None = None
    """Checkpoints in a forward pass, for the size of the buffer."""
    synchronize_checkpoint_boundary: bool = False
    """Wait for the device at each checkpoint."""
    profile: bool = False
    """Time each checkpoint."""


class Aio(Section):
    """Asynchronous I/O to NVMe."""

    nullable: ClassVar[bool] = True

    block_size: Count = 1_048_576
    """Bytes in one request."""
    queue_depth: Count = 8
    """Requests in flight for each thread."""
    intra_op_parallelism: Count = 1
    """Threads for one read or write."""
    single_submit: bool = False
    """Submit requests one by one."""
    overlap_events: bool = True
    """Submit the next requests while waiting."""
    use_gds: bool = False
    """NVIDIA GPUDirect Storage. CUDA only."""


class ParallelWrite(Section):
    """Who writes what."""

    pipeline_stage: bool = False
    """Each pipeline stage's data-parallel ranks share the writing."""


class Writer(Section):
    """The fast checkpoint writer. With type PYTHON, DeepSpeed 0.19.8 fails when it saves."""

    nullable: ClassVar[bool] = True

    type: Literal["FAST", "PYTHON", "MOCK"] = "FAST"
    """Kind of writer. FAST needs libaio."""
    io_buffer_size: Count = 67_108_864
    """Bytes in the page-locked buffer."""
    io_buffer_double: bool = True
    """Two buffers in turn."""
    io_multiplier: Count = 1
    """Files in one stripe."""
    show_statistics: bool = False
    """Print the rate."""
    data_parallel: Literal["REPLICA", "SOCKET", "MACHINE"] | None = None
    """Which ranks share the writing."""
    decoupled: bool = False
    """Write beside training."""

    folded: ClassVar[Mapping[str, str]] = {"type": "upper", "data_parallel": "upper"}


class Checkpoint(Section):
    """How DeepSpeed's own checkpoints are read and written."""

    tag_validation: Literal["WARN", "IGNORE", "FAIL"] = "WARN"
    """What happens when ranks save under different tags."""
    load_universal: bool = False
    """The checkpoint is a Universal one."""
    use_node_local_storage: bool = False
    """Each node has a file system of its own."""
    parallel_write: ParallelWrite | None = None
    """Who writes what."""
    checkpoint_serialization: bool = True
    """Serialise tensors as torch does."""
    writer: Writer | None = None
    """The fast writer."""

    folded: ClassVar[Mapping[str, str]] = {"tag_validation": "upper"}


class Compile(Unmodelled):
    """DeepCompile: ZeRO inside the compiled graph. No engine accepts it."""

    deepcompile: bool = False
    """Turns it on."""


class Switched(Unmodelled):
    """A section that no training here uses."""

    enabled: bool = False
    """Turns it on."""

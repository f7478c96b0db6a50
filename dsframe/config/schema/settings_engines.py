# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""Sections of the ``dsframe`` section with the options of single engines."""

from typing import Literal

from dsframe.config.schema.base import Count, Positive, Section, Size


class Horovod(Section):
    """Options of the Horovod engine."""

    op: Literal["average", "sum"] | None = None
    """How gradients are combined. Default: by ``gradient_allreduce_op``."""
    compression: Literal["none", "fp16"] = "none"
    """Send gradients as they are or as fp16."""
    fusion_threshold_bytes: Size | None = None
    """Bytes of gradients that are reduced together. Default: HOROVOD_FUSION_THRESHOLD, else a quarter of all
    gradients, between 1 and 64 MiB."""
    cycle_time_milliseconds: Positive | None = None
    """Time between two rounds of reductions. Default: HOROVOD_CYCLE_TIME, else 5 ms on CPUs and Horovod's own 1 ms on GPUs."""


class Ddp(Section):
    """Options of the DDP engine."""

    bucket_cap_megabytes: Positive | None = None
    """Megabytes (2 to the 20 bytes) of gradients that are reduced together. Default: a quarter of all, 1 at least and 64 at
    most, so that most can leave while the backward pass still runs."""
    static_graph: bool = False
    """The model uses the same operations at each step. From three ranks on, a run that goes on from a checkpoint adds
    up the gradients of its first steps in another order then, which changes last bits."""
    gradient_as_bucket_view: bool = True
    """Gradients live in the buckets: less memory."""
    find_unused_parameters: bool = False
    """Let DDP search the graph at each step for parameters without a gradient. Without it they have zero
    gradients too, at less cost."""
    communication: Literal["none", "fp16", "bf16"] = "none"
    """How gradients are sent: as they are, or rounded to 16 bits and added up so (``fp16`` ends at 65,504)."""


class Fsdp(Section):
    """Options of the FSDP engine."""

    wrap: list[str] = []
    """Classes of the model, by name. Each instance is gathered as one, and given up before the next. Default: the class that
    the model repeats, as for ``activation_checkpointing``, else the one that occurs most often in its lists of layers; of large
    models on CPUs parts of it, down to single layers, if it is large beside a rank's shard. What shares a parameter with another
    part of the model stays with the whole model."""
    sharding: Literal["full", "hybrid"] = "full"
    """``full``: sharded over all ranks. ``hybrid``: shares within groups of ranks, and each group has a whole model."""
    shard_size: Count | None = None
    """Ranks of a group, for ``hybrid``. Divides the number of processes. Default: the ranks of a host."""
    offload: Literal["none", "cpu"] = "none"
    """``cpu``: shards of weights, gradients and optimizer state stay in the host's memory, and the CPU makes the update."""
    reshard_after_forward: bool = True
    """Free a unit's weights after its forward pass and gather them again for the backward pass: less memory, 1.5
    times the communication."""
    accumulate: Literal["whole", "shards"] = "whole"
    """Gradients between micro-batches: ``whole`` on every rank and reduced once in a step, or reduced each time and kept in
    ``shards``: less memory, more is sent."""

    def splits(self, block: int, elements: int, ranks: int, *, on_cpu: bool) -> bool:
        """True if units smaller than the largest ``block`` are chosen for a model of so many ``elements``, where none are named.

        On CPUs, where collectives hide behind nothing and fewer, larger ones win little: of a model of 403 M parameters in 8
        blocks on 4 ranks, whole blocks and their gradients took 770 MiB beside a share of 1,536 (``benchmarks.sharded_memory``).
        """
        return not self.wrap and on_cpu and elements > 1 << 24 and block > elements // (8 * ranks)

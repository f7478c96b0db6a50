"""Bytes that a run of each engine holds and sends for each parameter.

``dsframe plan`` use these formulas. ``Costs`` is that of full
replicas, which an engine from outside is taken to hold. ``python -m tests.footprint`` measures them.
Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsframe.config.resolve.memory import Cost, moments
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import Settings


class Costs:
    """Full replicas, whose gradients are all-reduced in buckets. One object for each file."""

    def __init__(self, file: DeepSpeed, settings: Settings) -> None:
        self.file, self.settings = file, settings
        self.width = 2.0 if file.fp16.enabled or file.bf16.enabled else 4.0
        """Bytes of a number in the model's own format."""
        self.moments = moments(file) + (settings.ema is not None)
        """fp32 numbers for each parameter: the optimizer's moments, the average of the weights."""
        self.stage = 0
        """What data-parallel ranks shard, as ZeRO counts it: 0 nothing, 1 optimizer state, 2
        gradients, 3 parameters."""
        self.tensor_ranks = 1
        self.model_ranks = 1
        """Ranks that together hold one model."""
        self.accumulates_whole = False
        """True if gradients that end in shards are whole until the last micro-batch."""
        self.flattens = False
        """True if gradients and state lie in flat tensors, to and from which each step copies."""
        self.scatters = False
        """True if gradients are reduced to the rank that needs them: half of an all-reduce."""
        self.fetches = False
        """True if sharded parameters lie on the host until they are needed."""
        self.gathers_blocks = False
        """True if sharded parameters are gathered block by block; else module by module."""

    def held(self, ranks: int) -> Cost:
        """Bytes of each parameter that a rank's pipeline stage and tensor shard hold, among
        ``ranks`` data-parallel ones, from the end of a backward pass to the update.

        16-bit gradients become fp32 before the update, which is made on an fp32 copy of the weights.
        """
        masters = 4.0 if self.width == 2 else 0.0
        return Cost(self.width, 4.0, masters + 4.0 * self.moments)

    def cost(self, world_size: int) -> Cost:
        """Bytes on the device for each parameter of a model that is evenly split among the ranks
        that share one."""
        held = self.held(max(1, world_size // self.model_ranks))
        sizes = (held.parameter, held.gradient, held.optimizer, held.host)
        return Cost(*(size / self.model_ranks for size in sizes))

    def builds_in_files(self, ranks: int) -> bool:
        """True if each of ``ranks`` data-parallel ranks builds the model in files and shards it
        from there (``dsframe.model.spill``); else in its host's memory, in fp32."""
        return self.stage == 3 and (ranks > 1 or self.fetches)

    def gradient_bytes(self, width: int) -> float:
        """Bytes of one gradient as it is sent. ``width``: bytes of a parameter."""
        return 4.0

    def bucket_bytes(self, trained: float, width: int, accumulation_steps: int) -> float:
        """Bytes of copies of gradients, for communication, while a step is at its fullest."""
        return 0.0

    def keeps(self, parameters: int) -> bool:
        """True if so many sharded parameters are all kept whole between steps."""
        return False

    def gathers(self, parameters: float, passes: int) -> int:
        """How often sharded parameters are gathered in a micro-batch of ``passes`` passes."""
        return passes


class DdpCosts(Costs):
    """PyTorch DDP."""

    def gradient_bytes(self, width: int) -> float:
        return 2.0 if self.settings.ddp.communication in ("fp16", "bf16") else float(width)

    def bucket_bytes(self, trained: float, width: int, accumulation_steps: int) -> float:
        """A first micro-batch of several makes gradients of its own; and of 16-bit ones the fp32
        copies are next to the buckets."""
        views = self.settings.ddp.gradient_as_bucket_view
        copies = accumulation_steps > 1 or self.width == 2 or not views
        return trained * width if copies else 0.0


class HorovodCosts(Costs):
    """Horovod: fp32 gradients in buckets of their own, which may be rounded to be sent."""

    def gradient_bytes(self, width: int) -> float:
        return 2.0 if self.settings.horovod.compression == "fp16" else 4.0

    def bucket_bytes(self, trained: float, width: int, accumulation_steps: int) -> float:
        """By the threshold of fusion, else the engine's usual size."""
        from dsframe.engines.buckets import usual_bytes  # imports torch

        threshold = self.settings.horovod.fusion_threshold_bytes
        size = usual_bytes(4 * int(trained)) if threshold is None else max(threshold, 1)
        return min(size, 4 * trained)


class FsdpCosts(Costs):
    """PyTorch FSDP: fp32 shards, gathered block by block in the format that it computes in."""

    def __init__(self, file: DeepSpeed, settings: Settings) -> None:
        super().__init__(file, settings)
        self.stage, self.gathers_blocks = 3, True
        self.accumulates_whole = settings.fsdp.accumulate == "whole"

    def held(self, ranks: int) -> Cost:
        """It computes in 16 bits from fp32 shards, and has no copy."""
        return Cost(*(size / ranks for size in (4.0, 4.0, 4.0 * self.moments)))

    def gathers(self, parameters: float, passes: int) -> int:
        return passes if self.settings.fsdp.reshard_after_forward else 1


class ZeroCosts(Costs):
    """DeepSpeed 0.19.8, stages 0 to 3, its offload, pipeline and tensor parallelism."""

    def __init__(self, file: DeepSpeed, settings: Settings) -> None:
        super().__init__(file, settings)
        zero = file.zero_optimization
        self.stage = zero.stage
        self.tensor_ranks = max(1, file.tensor_parallel.autotp_size)
        self.model_ranks = file.pipeline.stages * self.tensor_ranks
        self.flattens = zero.stage > 0
        # DeepSpeed all-reduces gradients at stages 1 and 2 by default, where the paper scatters.
        self.scatters = zero.stage > 0 and not zero.use_multi_rank_bucket_allreduce
        self.fetches = zero.parameter_device != "none"
        self.accumulates_whole = zero.stage >= 2 and settings.deepspeed.accumulate == "whole"

    def held(self, ranks: int) -> Cost:
        """In fp32 stages 1 to 3 keep a copy of the weights to update, so that K is 12 there too
        (deepspeed 0.19.8, ``runtime/zero/stage_1_and_2.py``: single_partition_of_fp32_groups;
        ``stage3.py``: fp32_partitioned_groups_flat), where a plain optimizer has 8."""
        zero, stage = self.file.zero_optimization, self.stage
        parameter = gradient = self.width
        masters = 4.0 if self.width == 2 or stage >= 1 else 0.0
        optimizer, host = masters + 4.0 * self.moments, 0.0
        offloaded = zero.optimizer_device != "none"
        if stage >= 1:
            if zero.optimizer_device == "cpu" or (offloaded and stage < 3):
                # with the gradients, in fp32, and a buffer in the model's own format (stage3.py:
                # grad_partitions_flat_buffer; stage_1_and_2.py: param_buffer_of_bit16_for_cpu_...)
                host = (optimizer + 4.0 + parameter) / ranks
            optimizer = 0.0 if offloaded else optimizer / ranks
        if stage >= 2:
            gradient = 0.0 if offloaded else gradient / ranks
        if stage >= 3:
            host += parameter / ranks if zero.parameter_device == "cpu" else 0.0
            parameter = 0.0 if self.fetches else parameter / ranks
        return Cost(parameter, gradient, optimizer, host)

    def gradient_bytes(self, width: int) -> float:
        """As ``communication_data_type`` says, else in the model's own format."""
        written = self.file.communication_data_type
        if written is None:
            return float(width)
        return 4.0 if "32" in written else 2.0

    def keeps(self, parameters: int) -> bool:
        """True below the threshold (``dsframe.engines.deepspeed.engine``)."""
        zero = self.file.zero_optimization
        return zero.keeps_whole(parameters)

    def gathers(self, parameters: float, passes: int) -> int:
        """Once where parameters may stay until the backward pass."""
        zero = self.file.zero_optimization
        limit = min(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance)
        return 1 if parameters <= limit else passes


_COSTS: Mapping[str, type[Costs]] = {
    "deepspeed": ZeroCosts,
    "ddp": DdpCosts,
    "horovod": HorovodCosts,
    "fsdp": FsdpCosts,
}


def costs_of(engine: str, file: DeepSpeed, settings: Settings) -> Costs:
    """Returns what a run of this file on this engine holds and sends."""
    return _COSTS.get(engine, Costs)(file, settings)

"""Bytes that a run of each engine holds and sends: the facts behind ``dsframe plan`` and ``dsframe check --gpu-memory``.

``Costs`` is that of full replicas, which an engine from outside is taken to hold; others say what is different with them.
Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dsframe.config.resolve.memory import Cost, SetUp, moments
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import Settings


class Costs:
    """Full replicas, whose gradients are all-reduced in buckets while the backward pass runs. One object for each file."""

    copies_buckets = False
    """True if gradients are copied into buckets, which stay in memory, in fp32."""
    gathers_blocks = False
    """True if sharded parameters are gathered block by block, each with buffers of its own; else module by module."""

    def __init__(self, file: DeepSpeed, settings: Settings) -> None:
        self.file, self.settings = file, settings

    @property
    def short(self) -> bool:
        """True if the model's own number format has 16 bits."""
        return self.file.fp16.enabled or self.file.bf16.enabled

    @property
    def moments(self) -> int:
        """fp32 numbers that are kept for each parameter beside its master: the optimizer's, and the average of the weights."""
        return moments(self.file) + (self.settings.ema is not None)

    @property
    def stage(self) -> int:
        """Returns what data-parallel ranks shard, by ZeRO stage: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters."""
        return 0

    @property
    def model_ranks(self) -> int:
        """Ranks that together hold one model."""
        return 1

    @property
    def tensor_ranks(self) -> int:
        """Slices of each layer."""
        return 1

    @property
    def accumulates_whole(self) -> bool:
        """True if gradients that end in shares are whole until the last micro-batch, and reduced once."""
        return False

    @property
    def flattens(self) -> bool:
        """True if gradients and state lie in flat tensors, to and from which each step copies."""
        return False

    @property
    def scatters(self) -> bool:
        """True if gradients are reduced to the rank that needs them, which sends half as much as an all-reduce."""
        return False

    @property
    def fetches(self) -> bool:
        """True if sharded parameters lie on the host until they are needed."""
        return False

    def held(self, ranks: int) -> Cost:
        """Bytes of each parameter that a rank's pipeline stage and tensor slice hold, among ``ranks`` data-parallel ones.

        16-bit gradients become fp32 before the update, which is made on a copy of the weights in fp32.
        """
        optimizer = (4.0 if self.short else 0.0) + 4.0 * self.moments
        return Cost(2.0 if self.short else 4.0, 4.0, optimizer)

    def cost(self, world_size: int) -> Cost:
        """Bytes on the device for each parameter of the model, from the end of a backward pass to the update.

        Of a model that is cut evenly among the ranks that share one. ``python -m tests.footprint`` measures them.
        """
        one = self.held(max(1, world_size // self.model_ranks))
        return Cost(*(value / self.model_ranks for value in (one.parameter, one.gradient, one.optimizer, one.host)))

    def builds_in_files(self, ranks: int) -> bool:
        """True if each of ``ranks`` data-parallel ranks builds the model in files and shards it from there."""
        return self.stage == 3 and (ranks > 1 or self.fetches)

    def setup(self, held: Cost, ranks: int, slices: int, *, on_cpu: bool = False) -> SetUp:
        """Bytes of each parameter of a rank's tensor slice, one of ``slices``, at the fullest moment before the first step.

        The model is built on the CPU in fp32. Where parameters are sharded, a rank's part lies in memory and the rest in files, and
        each is sharded by itself (with tensor parallelism they are sliced first, whole on the device). Else each goes to the device
        by itself, in the format that it is trained in. Then the engine adds fp32 masters and the gradients that it keeps; moments
        are made in the first step.

        ``held``: what lasts, as :meth:`held` says. Not counted are the parameters that are whole at that moment, two of them.
        """
        width, files = 2.0 if self.short else 4.0, self.builds_in_files(ranks)
        masters = 4.0 / ranks if self.flattens else 4.0 if width < 4 and not self.gathers_blocks else 0.0
        if self.file.zero_optimization.optimizer_device != "none" and not on_cpu:
            masters = 0.0
        elif self.flattens:  # flat gradients, and of 16-bit weights one more flat copy while masters are made of them
            masters += held.gradient + (width / ranks if width < 4 else 0.0)
        own = (0.0 if self.fetches and self.stage == 3 and not on_cpu else held.parameter) + masters
        whole = 4.0 * slices
        if files and slices > 1:
            own = max(own, width * slices)
        elif on_cpu and not files:  # built in fp32, and flattened once more
            own = max(own, whole * (2 if self.flattens else 1))
        kept = 4.0 / ranks if files and ranks > 1 else 0.0  # what a rank builds in memory (dsframe.model.spill)
        return SetUp(own, 0.0 if on_cpu else held.host + kept if files else whole, whole - kept if files else 0.0)

    def setup_cost(self, world_size: int) -> SetUp:
        """Bytes for each parameter of the model on a GPU, cut evenly as for :meth:`cost`."""
        ranks = max(1, world_size // self.model_ranks)
        one = self.setup(self.held(ranks), ranks, self.tensor_ranks)
        return SetUp(*(value / self.model_ranks for value in (one.device, one.host, one.disk)))

    def gradient_bytes(self, width: int) -> float:
        """Bytes of one gradient element as it is sent. ``width``: bytes of a parameter."""
        return 4.0

    def copies_gradients(self, accumulation_steps: int) -> bool:
        """True if a step holds every gradient twice, in the model's own format: as autograd makes it, and in its bucket."""
        return False

    def bucket_bytes(self, parameters: int, width: int, *, on_cpu: bool) -> float:
        """Bytes of one bucket as it is sent."""
        from dsframe.engines.buckets import usual_bytes  # imports torch

        # The limit is for gradients as they are, before they are rounded to be sent.
        return usual_bytes(width * parameters) * self.gradient_bytes(width) / width

    def keeps(self, parameters: int) -> bool:
        """True if so many sharded parameters are all kept whole between steps."""
        return False

    def gathers(self, parameters: float, passes: int) -> int:
        """Returns how often the sharded parameters are gathered in a micro-batch of ``passes`` forward and backward passes."""
        return passes


class DdpCosts(Costs):
    """PyTorch DDP: its communication hooks and its bucket's size."""

    def setup(self, held: Cost, ranks: int, slices: int, *, on_cpu: bool = False) -> SetUp:
        """With the buckets, which DDP makes when it wraps the model (torch 2.13.0, ``reducer.cpp``: initialize_buckets). Pages of a
        CPU that nothing was written to do not exist."""
        own = super().setup(held, ranks, slices, on_cpu=on_cpu)
        width = 2.0 if self.short else 4.0
        return own if on_cpu or ranks == 1 else replace(own, device=own.device + width)

    def copies_gradients(self, accumulation_steps: int) -> bool:
        """A first micro-batch of several makes gradients of its own; and of 16-bit ones the fp32 copies are beside the buckets."""
        return accumulation_steps > 1 or self.short or not self.settings.ddp.gradient_as_bucket_view

    def gradient_bytes(self, width: int) -> float:
        """The model's own number format, unless a communication hook rounds."""
        return 2.0 if self.settings.ddp.communication in ("fp16", "bf16") else float(width)

    def bucket_bytes(self, parameters: int, width: int, *, on_cpu: bool) -> float:
        """As the file says, else the usual."""
        megabytes = self.settings.ddp.bucket_cap_megabytes
        if megabytes is None:
            return super().bucket_bytes(parameters, width, on_cpu=on_cpu)
        return megabytes * 2**20 * self.gradient_bytes(width) / width


class HorovodCosts(Costs):
    """Horovod: fp32 gradients in buckets of their own, which may be rounded to be sent."""

    copies_buckets = True

    def gradient_bytes(self, width: int) -> float:
        """After its compression."""
        return 2.0 if self.settings.horovod.compression == "fp16" else 4.0

    def bucket_bytes(self, parameters: int, width: int, *, on_cpu: bool) -> float:
        """By groups, by the threshold of fusion, else the usual."""
        given, groups = self.settings.horovod.fusion_threshold_bytes, self.settings.horovod.groups
        if not groups and given is None:
            return super().bucket_bytes(parameters, 4, on_cpu=on_cpu)
        full = 4 * parameters / groups if groups else max(given or 0, 1)
        return full * self.gradient_bytes(width) / 4


class FsdpCosts(Costs):
    """PyTorch FSDP: everything in fp32 shares, gathered block by block in the format it computes in."""

    gathers_blocks = True
    stage = 3

    @property
    def accumulates_whole(self) -> bool:
        return self.settings.fsdp.accumulate == "whole"

    def held(self, ranks: int) -> Cost:
        """It computes in 16 bits from fp32 shares, and has no copy."""
        return Cost(*(value / ranks for value in (4.0, 4.0, 4.0 * self.moments)))

    def gathers(self, parameters: float, passes: int) -> int:
        """In each pass, or once and kept until the backward pass has ended."""
        return passes if self.settings.fsdp.reshard_after_forward else 1


class ZeroCosts(Costs):
    """DeepSpeed 0.19.8, stages 0 to 3, its offload, pipeline and tensor parallelism."""

    @property
    def stage(self) -> int:
        return self.file.zero_optimization.stage

    @property
    def model_ranks(self) -> int:
        """Pipeline stages, each cut into tensor slices."""
        return self.file.pipeline.stages * self.tensor_ranks

    @property
    def tensor_ranks(self) -> int:
        return max(1, self.file.tensor_parallel.autotp_size)

    @property
    def flattens(self) -> bool:
        """From stage 1 on."""
        return self.stage > 0

    @property
    def scatters(self) -> bool:
        """It all-reduces gradients at stages 1 and 2 by default, where the paper scatters."""
        return self.stage > 0 and not self.file.zero_optimization.use_multi_rank_bucket_allreduce

    @property
    def fetches(self) -> bool:
        """True if parameters are offloaded."""
        return self.file.zero_optimization.parameter_device != "none"

    @property
    def accumulates_whole(self) -> bool:
        """True if gradients are sharded and the file asks for it."""
        return self.stage >= 2 and self.settings.deepspeed.accumulate == "whole"

    def held(self, ranks: int) -> Cost:
        """In fp32 stages 1 to 3 keep a copy of the weights to update, so that K is 12 there too (deepspeed 0.19.8,
        ``runtime/zero/stage_1_and_2.py``: single_partition_of_fp32_groups; ``stage3.py``: fp32_partitioned_groups_flat), where
        a plain optimizer has 8."""
        zero, stage = self.file.zero_optimization, self.stage
        parameter = gradient = 2.0 if self.short else 4.0
        optimizer = (4.0 if self.short or stage >= 1 else 0.0) + 4.0 * self.moments
        offloaded, host = zero.optimizer_device != "none", 0.0
        if stage >= 1:
            if zero.optimizer_device == "cpu" or (zero.optimizer_device == "nvme" and stage < 3):
                # with the gradients, in fp32, and a buffer in the model's own format (stage3.py: grad_partitions_flat_buffer;
                # stage_1_and_2.py: param_buffer_of_bit16_for_cpu_offload_groups)
                host = (optimizer + 4.0 + parameter) / ranks
            optimizer = 0.0 if offloaded else optimizer / ranks
        if stage >= 2:
            gradient = 0.0 if offloaded else gradient / ranks
        if stage >= 3:
            host += parameter / ranks if zero.parameter_device == "cpu" else 0.0
            parameter = 0.0 if zero.parameter_device != "none" else parameter / ranks
        return Cost(parameter, gradient, optimizer, host)

    def gradient_bytes(self, width: int) -> float:
        """As ``communication_data_type`` says, else in the model's own format."""
        kind = self.file.communication_data_type
        return float(width) if kind is None else 4.0 if "32" in kind else 2.0

    def bucket_bytes(self, parameters: int, width: int, *, on_cpu: bool) -> float:
        """By ``reduce_bucket_size``."""
        size = self.file.zero_optimization.bucket_elements(parameters, on_cpu=on_cpu)
        return max(1.0, size * self.gradient_bytes(width))

    def keeps(self, parameters: int) -> bool:
        """True if all parameters are below the threshold (``dsframe.engines.deepspeed.engine``)."""
        return self.file.zero_optimization.keeps_whole(parameters) and self.settings.model.tiling is None

    def gathers(self, parameters: float, passes: int) -> int:
        """Once where parameters may stay until the backward pass."""
        zero = self.file.zero_optimization
        return 1 if parameters <= min(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance) else passes


_COSTS: Mapping[str, type[Costs]] = {
    "deepspeed": ZeroCosts,
    "ddp": DdpCosts,
    "horovod": HorovodCosts,
    "fsdp": FsdpCosts,
}


def costs_of(engine: str, file: DeepSpeed, settings: Settings) -> Costs:
    """Returns what a run of this file on this engine holds and sends."""
    return _COSTS.get(engine, Costs)(file, settings)

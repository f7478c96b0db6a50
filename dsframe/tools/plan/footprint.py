"""Peak bytes of one rank, computed from a traced model.

States follow the ZeRO paper (Rajbhandari et al. 2020, arXiv 1910.02054); buffers were measured (DeepSpeed 0.19.8, FSDP,
DDP, Horovod).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dsframe.config import Batch, Config
from dsframe.config.resolve.memory import Cost, moments
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import Settings
from dsframe.engines import TABLE
from dsframe.tools.plan.device import Device
from dsframe.tools.plan.model import Affine, Model

MARGIN = 0.1
"""Fraction of a device's memory; half of the predictions are off by at most this."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Buckets of collectives, gathered parameters, results of an operation."""
    base: float
    """In use before the first tensor."""
    host: float = 0.0
    """In host memory."""

    @property
    def states(self) -> float:
        """Persistent bytes: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Peak bytes on the device."""
        return self.states + self.activations + self.buffers + self.base


@dataclass(frozen=True)
class Prediction:
    """One file on one number of processes. Memory is that of a pipeline stage of mean size."""

    engine: str
    batch: Batch
    stages: int
    memory: Memory
    fullness: float
    """Fraction used of the device's or host's memory, whichever is larger; above 1 it does not fit."""

    @property
    def fits(self) -> bool:
        return self.fullness <= 1

    @property
    def tight(self) -> bool:
        """True if it fits with a margin below the prediction error (``MARGIN``)."""
        return 1 - MARGIN < self.fullness <= 1

    def to_json(self) -> dict[str, Any]:
        """Returns plain numbers: bytes, samples."""
        memory, batch = self.memory, self.batch
        return {
            "engine": self.engine,
            "data_parallel_size": batch.data_parallel_size,
            "tensor_parallel_size": batch.tensor_parallel_size,
            "pipeline_stages": self.stages,
            "train_batch_size": batch.train_batch_size,
            "micro_batch_size": batch.micro_batch_size,
            "accumulation_steps": batch.accumulation_steps,
            "memory_bytes": vars(memory) | {"states": memory.states, "total": memory.total},
            "fits": self.fits,
            "tight": self.tight,
        }


def predict(
    config: Config, engine: str, model: Model, device: Device, world_size: int, batch: Batch | None = None
) -> Prediction:
    """Returns the prediction. ``batch`` replaces the file's. Raises ConfigError if the batch is not divisible."""
    batch = batch or config.batch(world_size, replicas=TABLE[engine].replicas)
    zero, pipeline = config.deepspeed.zero_optimization, config.deepspeed.pipeline
    if config.settings.model.recomputation or (pipeline.stages > 1 and pipeline.activation_checkpoint_interval):
        model = model.recomputed or model
    chosen = zero.fetched_elements(model.parameters + model.frozen, on_cpu=device.on_cpu)
    file = config.deepspeed.model_copy(update={"zero_optimization": zero.model_copy(update=chosen)})
    rank = _Rank(file, config.settings, engine, model, device, batch)
    memory = rank.memory()
    fullness = max(memory.total / device.memory_bytes, memory.host / device.host_memory_bytes)
    return Prediction(engine, batch, rank.stages, memory, fullness)


class _Rank:
    """One rank of a run."""

    def __init__(
        self, file: DeepSpeed, settings: Settings, engine: str, model: Model, device: Device, batch: Batch
    ) -> None:
        self.file, self.settings, self.engine, self.model = file, settings, engine, model
        self.device, self.batch = device, batch
        by_deepspeed = not TABLE[engine].replicas
        self.zero = file.zero_optimization
        self.stage = self.zero.stage if by_deepspeed else 3 if engine == "fsdp" else 0
        """ZeRO's number for what data-parallel ranks shard: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters."""
        self.flattens = by_deepspeed and self.stage > 0
        """True if gradients and state are flat tensors, to and from which each step copies."""
        self.fetches = by_deepspeed and self.zero.parameter_device != "none"
        """True if sharded parameters are on the host until they are needed."""
        self.stages = file.pipeline.stages if by_deepspeed else 1
        self.tensor = batch.tensor_parallel_size
        self.data = batch.data_parallel_size * batch.sequence_parallel_size
        """Number of ranks that shard states."""
        # A stage has complete layers.
        layer = min(max(model.block, model.largest), model.parameters) if self.stages > 1 else 0
        self.trained = max(model.parameters / self.stages, layer) / self.tensor
        """Trained elements of this rank's pipeline stage and tensor shard."""
        self.frozen = model.frozen / self.stages / self.tensor
        self.width = model.bytes_each
        self.under_way = min(self.stages, batch.accumulation_steps)
        """Micro-batches whose backward pass is still to come (1F1B)."""
        self.keeps = by_deepspeed and self.zero.keeps_whole(model.parameters + model.frozen)
        """True if parameters stay gathered between steps."""

    def at(self, grows: Affine) -> float:
        """Returns the size for this rank's part of a micro-batch, in its stage."""
        return grows.at(self.batch.micro_batch_size) / self.batch.sequence_parallel_size / self.stages

    def memory(self) -> Memory:
        trained, cost, on_cpu = self.trained, self.states(), self.device.on_cpu
        frozen = self.frozen / (self.data if self.stage == 3 else 1)
        activations = max(self.activations(), self.evaluation())
        # On a GPU the memory of freed activations is reused.
        update = self.update() - (0.0 if on_cpu else activations)
        kept = trained * self.width if self.keeps and self.data > 1 else 0.0
        buffers = self.buffers() + max(self.reduced(), update)
        buffers += self.gathered() - kept if self.stage == 3 else 0.0
        if self.tensor > 1 and self.stage == 3 and self.data > 1:  # AutoTP shards complete weights, on the device
            buffers = max(buffers, trained * self.tensor * self.width)
        # A background save copies a rank's shard of weights and moments, in fp32.
        moments_each = moments(self.file) + (self.settings.ema is not None)
        saving = 4.0 * (1 + moments_each) * trained / self.data if self.settings.checkpoints.asynchronous else 0.0
        host = cost.host * trained + saving
        fetches = self.fetches and self.stage == 3 and not on_cpu
        if fetches and self.zero.parameter_device != "nvme":
            host += frozen * self.width
        return Memory(
            parameters=cost.parameter * trained + (0.0 if fetches else frozen * self.width) + kept,
            gradients=cost.gradient * trained,
            # Offload makes no difference: a CPU has only one memory.
            optimizer=(cost.optimizer + (cost.host if on_cpu else 0.0)) * trained,
            activations=activations,
            buffers=buffers + (saving if on_cpu else 0.0),
            base=self.device.base_bytes,
            host=0.0 if on_cpu else host,
        )

    def states(self) -> Cost:
        """Returns bytes per parameter from the end of a backward pass to the update."""
        cost = _states(self.file, self.settings, self.engine, self.data)
        if self.engine == "fsdp" and self.batch.accumulation_steps > 1:
            return replace(cost, gradient=cost.gradient * self.data)
        return cost

    def activations(self) -> float:
        """Returns the bytes that the forward pass keeps for the backward pass."""
        model, wide = self.model, self.at(self.model.saved_wide)
        held = self.under_way * (wide + (self.at(model.saved) - wide) / self.tensor)
        held += self.at(model.transient) * self.stages / self.tensor
        # Each rank reads full sequences.
        return held + self.under_way * model.inputs.at(self.batch.micro_batch_size)

    def evaluation(self) -> float:
        """Returns the bytes of the largest operation's inputs and results in evaluation, which keeps nothing for a
        backward pass but may have larger batches (``eval_micro_batch_size``)."""
        rows = self.settings.eval_micro_batch_size or self.batch.micro_batch_size
        return 2 * self.model.scratch.at(rows) / self.tensor / self.batch.sequence_parallel_size

    def buffers(self) -> float:
        """Returns the bytes of an operation's results, and of gradients that wait to be reduced."""
        size = self.at(self.model.scratch) * self.stages + self.model.buffer_bytes
        if self.data > 1:
            size += self.copies_of_gradients()
        if self.flattens and self.zero.contiguous_gradients:
            bucket = float(self.bucket_elements())
            if self.device.on_cpu:  # unwritten pages take no memory
                bucket = min(bucket, self.trained)
            size += bucket * self.width * (2 if self.zero.overlap_comm and self.stage < 3 else 1)
            if self.stage == 1:  # gradients that fit are in the bucket
                size -= min(bucket, self.trained) * self.width
        return size

    def copies_of_gradients(self) -> float:
        """Returns the bytes of the buffers that DDP and Horovod copy gradients to."""
        if self.engine == "ddp":
            # The first of several micro-batches creates separate gradients; fp32 copies of 16-bit ones are kept next to
            # the buckets.
            copies = self.batch.accumulation_steps > 1 or self.width == 2
            return self.trained * self.width if copies else 0.0
        if self.engine == "horovod":
            from dsframe.engines.buckets import usual_bytes  # imports torch

            return min(usual_bytes(4 * int(self.trained)), 4 * self.trained)
        return 0.0

    def bucket_elements(self) -> int:
        return self.zero.bucket_elements(self.model.parameters, on_cpu=self.device.on_cpu)

    def gathered(self) -> float:
        """Returns the bytes of gathered parameters, if they are sharded or on the host, and of what comes with them."""
        held = self.trained + self.frozen
        if self.engine == "fsdp":
            if self.data == 1:
                return 0.0
            # The next unit is gathered while one computes; the gradients of one are complete, then in fp32.
            return min(self.trained, 2 * self.model.block) * (self.width + 4)
        unit = self.module()
        live = min(held, max(self.zero.stage3_max_live_parameters, unit)) * self.width
        if self.data == 1:  # nothing to gather, but parameters on the host are copied (NoGatherHandle)
            return live if self.fetches and not self.device.on_cpu else 0.0
        # Prefetched parameters exist twice (partition_parameters.py: AllGatherCoalescedHandle).
        return live + min(held, max(self.zero.stage3_prefetch_bucket_size, unit)) * self.width

    def module(self) -> int:
        """Returns the elements that ZeRO-3 gathers at the same time: the largest module's own, or a full block if
        blocks are recomputed or compiled (``switches.units``)."""
        switched = self.settings.model
        if switched.activation_checkpointing or switched.compile == "blocks":
            return max(self.model.block, self.model.largest)
        return self.model.largest

    def reduced(self) -> float:
        """Returns the bytes of the flat copy of the bucket that ZeRO sends (stage_1_and_2.py: allreduce_bucket;
        stage3.py: reduce_scatter_coalesced)."""
        if not self.flattens:
            return 0.0
        written = self.file.communication_data_type
        width = float(self.width) if written is None else 4.0 if "32" in written else 2.0
        return min(self.bucket_elements(), self.trained) * width

    def update(self) -> float:
        """Returns the bytes of the flat gradients of ZeRO's shard at the step, and of their fp32 copy
        (stage_1_and_2.py, stage3.py: step)."""
        if not self.flattens or self.zero.optimizer_device != "none":
            return 0.0
        return (self.width + (4 if self.width < 4 else 0)) * self.trained / self.data


def _states(file: DeepSpeed, settings: Settings, engine: str, ranks: int) -> Cost:
    """Returns bytes per parameter on one of ``ranks`` data-parallel ranks.

    16-bit gradients are converted to fp32 before the update of an fp32 copy of the weights. In fp32 ZeRO's stages 1 to
    3 keep such a copy too (deepspeed 0.19.8, ``runtime/zero/stage_1_and_2.py``: single_partition_of_fp32_groups;
    ``stage3.py``: fp32_partitioned_groups_flat), where a plain optimizer has 8 bytes.
    """
    width = 2.0 if file.fp16.enabled or file.bf16.enabled else 4.0
    state = 4.0 * (moments(file) + (settings.ema is not None))
    if engine == "fsdp":  # computes in 16 bits from fp32 shards without a copy
        return Cost(4.0 / ranks, 4.0 / ranks, state / ranks)
    masters = 4.0 if width == 2 else 0.0
    if TABLE[engine].replicas:
        return Cost(width, 4.0, masters + state)
    zero, stage = file.zero_optimization, file.zero_optimization.stage
    parameter = gradient = width
    optimizer = (4.0 if stage else masters) + state
    host = 0.0
    offloaded = zero.optimizer_device != "none"
    if stage >= 1:
        if zero.optimizer_device == "cpu" or (offloaded and stage < 3):
            # includes fp32 gradients, and a buffer in the model's dtype (stage3.py: grad_partitions_flat_buffer;
            # stage_1_and_2.py: param_buffer_of_bit16_for_cpu_...)
            host = (optimizer + 4.0 + parameter) / ranks
        optimizer = 0.0 if offloaded else optimizer / ranks
    if stage >= 2:
        gradient = 0.0 if offloaded else gradient / ranks
    if stage >= 3:
        host += parameter / ranks if zero.parameter_device == "cpu" else 0.0
        parameter = 0.0 if zero.parameter_device != "none" else parameter / ranks
    return Cost(parameter, gradient, optimizer, host)

"""One file, one model, one machine, one number of processes: what every prediction is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from dsframe.config import Batch, Config, memory
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.settings import Settings
from dsframe.engines import TABLE, buckets
from dsframe.errors import ConfigError, Problem
from dsframe.plan.hardware import Hardware
from dsframe.plan.model import Model, Segment


@dataclass(frozen=True)
class Case:
    """What the parts of a prediction share."""

    file: DeepSpeed
    settings: Settings
    engine: str
    model: Model
    hardware: Hardware
    world_size: int
    batch: Batch
    seconds_each: float | None = None
    """Known seconds of one sample's forward and backward pass on one device; None: the roofline's."""

    @classmethod
    def of(
        cls,
        config: Config,
        engine: str,
        model: Model,
        hardware: Hardware,
        world_size: int,
        seconds_each: float | None = None,
    ) -> Case:
        """Raises ConfigError where the batch cannot be cut so."""
        batch = config.batch(world_size, replicas=TABLE[engine].replicas)
        if batch.sequence_parallel_size > 1:
            key = "sequence_parallel_size"
            raise ConfigError(
                [
                    Problem(
                        "error", key, "slices of sequences cannot be predicted", "measure the run, or take it out for the plan",
                        str(config.path or ""), *config.position((key,)), code="plan",
                    )
                ]
            )  # fmt: skip
        return cls(config.deepspeed, config.settings, engine, model, hardware, world_size, batch, seconds_each)

    @property
    def replicas(self) -> bool:
        return TABLE[self.engine].replicas

    @property
    def stages(self) -> int:
        return 1 if self.replicas else self.file.pipeline.stages

    @property
    def tensor(self) -> int:
        return self.batch.tensor_parallel_size

    @property
    def data(self) -> int:
        return self.batch.data_parallel_size

    @property
    def rows(self) -> int:
        """Samples of a micro-batch."""
        return self.batch.micro_batch_size

    @property
    def steps(self) -> int:
        """Micro-batches of a step."""
        return self.batch.accumulation_steps

    @property
    def zero(self) -> int:
        """What is partitioned, as ZeRO counts it."""
        if self.engine == "fsdp":
            return 3
        return 0 if self.replicas else self.file.zero_optimization.stage

    @property
    def checkpointed(self) -> bool:
        """Whether blocks keep their inputs alone and compute the rest again."""
        recomputes = self.stages > 1 and self.file.pipeline.activation_checkpoint_interval > 0
        return bool(self.settings.model.activation_checkpointing) or recomputes

    @property
    def passes(self) -> int:
        """Forward, backward, and forward again where activations are computed again."""
        return 3 if self.checkpointed else 2

    @property
    def cost(self) -> memory.Cost:
        """Bytes on a rank of each parameter that its stage and its tensor slice hold."""
        one = memory.held(self.file, self.data, self.engine)
        whole = self.accumulates_whole and self.steps > 1
        return replace(one, gradient=one.gradient * self.data) if whole else one

    @property
    def accumulates_whole(self) -> bool:
        """Whether gradients that end in shares are kept whole until the last micro-batch, and reduced once."""
        if self.engine == "fsdp":
            return self.settings.fsdp.accumulate == "whole"
        return not self.replicas and self.zero >= 2 and self.settings.deepspeed.accumulate == "whole"

    @property
    def gradient_bytes(self) -> float:
        """Of one gradient on its way to other ranks."""
        kind = self.file.communication_data_type
        if not self.replicas and kind is not None:
            return 4.0 if "32" in kind else 2.0
        if self.engine == "horovod" and self.settings.horovod.compression == "fp16":
            return 2.0
        if self.engine == "ddp":
            return 2.0 if self.settings.ddp.communication in ("fp16", "bf16") else float(self.model.bytes_each)
        return 4.0 if self.replicas else float(self.model.bytes_each)

    @property
    def bucket_bytes(self) -> float:
        """Of the gradients that leave together."""
        if self.engine == "horovod":
            given, groups = self.settings.horovod.fusion_threshold_bytes, self.settings.horovod.groups
            whole = 4 * self.model.parameters
            full = whole / groups if groups else buckets.usual_bytes(whole) if given is None else max(given, 1)
            return full * self.gradient_bytes / 4  # fp32 in the bucket, rounded to be sent
        if self.replicas:
            megabytes = self.settings.ddp.bucket_cap_megabytes
            usual = buckets.usual_bytes(self.model.bytes_each * self.model.parameters)
            # As on Horovod the limit is for gradients as they are, before they are rounded to be sent.
            return (megabytes * 2**20 if megabytes else usual) * self.gradient_bytes / self.model.bytes_each
        return max(1.0, self.file.zero_optimization.reduce_bucket_size * self.gradient_bytes)

    @property
    def kept(self) -> bool:
        """Whether ZeRO-3 keeps every parameter whole between steps (``dsframe.engines.zero``)."""
        tiled = self.settings.model.tiling is not None
        whole = self.file.zero_optimization.keeps_whole(self.model.parameters + self.model.frozen)
        return self.engine == "deepspeed" and whole and not tiled

    @property
    def fetches(self) -> bool:
        """Whether parameters lie on the host and are copied to the device when their turn comes."""
        offloaded = self.engine == "deepspeed" and self.file.zero_optimization.parameter_device != "none"
        return offloaded and self.zero == 3 and not self.hardware.on_cpu

    @property
    def on_disk(self) -> bool:
        """Whether parameters lie on the host's disk and not in its memory."""
        return self.file.zero_optimization.parameter_device == "nvme"

    def block(self, part: Sequence[Segment]) -> int:
        """Elements of the largest layer of a model that is a list of them, else of what has an attention."""
        if self.model.layered:
            return max((segment.parameters for segment in part), default=0)
        return sum(segment.parameters for segment in part) // max(1, self.model.attentions)

    def fetched(self, part: Sequence[Segment]) -> int:
        """Elements that ZeRO-3 needs whole at the same time: the largest module's own, tiles taken one by one; all of a block
        where that is computed again, or compiled (``switches.units``)."""
        largest = max((segment.largest for segment in part), default=0)
        if self.settings.model.activation_checkpointing or self.settings.model.compile == "blocks":
            return max(self.block(part), largest)
        wanted = self.settings.model.tiling
        pieces = wanted.in_splits * wanted.out_splits if wanted else 1

        def tiled(name: str) -> bool:
            # By the last part: a name within a layer lacks what stands before it in the model.
            names = wanted.modules if wanted else []
            return any(fnmatch(name.rpartition(".")[2], pattern.rpartition(".")[2]) for pattern in names)

        linears = [one for segment in part for one in segment.linears if one.rows]
        sizes = [-(-one.elements // pieces) if tiled(one.name) else one.elements for one in linears]
        return max([largest, *sizes])

    def gathers(self, elements: float) -> int:
        """How often in a step a parameter that lies in shares is gathered: after the update where it is kept; else for each
        micro-batch, once where it may stay until the backward pass."""
        if self.kept:
            return 1
        if self.engine == "fsdp":
            return self.steps * (self.passes if self.settings.fsdp.reshard_after_forward else 1)
        zero = self.file.zero_optimization
        stays = elements <= min(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance)
        return self.steps * (1 if stays else self.passes)

    @property
    def reductions(self) -> int:
        """How often in a step gradients are exchanged."""
        return self.steps if self.zero >= 2 and not self.accumulates_whole else 1


def elements(part: Sequence[Segment]) -> int:
    """Trained parameters that a stage of ``cut`` holds: its own, and its copies of those that another stage owns."""
    return sum(segment.parameters + segment.shared for segment in part)


def with_frozen(part: Sequence[Segment]) -> int:
    """These and the ones that are not trained: what ZeRO-3 divides, gathers and offloads."""
    return elements(part) + sum(segment.frozen for segment in part)


def cut(segments: Sequence[Segment], stages: int) -> list[tuple[Segment, ...]]:
    """Contiguous stages whose largest has as few parameters as possible (DeepSpeed's ``partition_method="parameters"``).

    What a layer shares with one of its own stage is there once, and its gradient is done when the owner's is.
    """
    if stages == 1:
        return [tuple(_alone(segment) if segment.shared else segment for segment in segments)]
    weights = [segment.parameters + 1 for segment in segments]

    def fill(limit: int) -> list[tuple[Segment, ...]]:
        parts: list[list[Segment]] = [[]]
        load = 0
        for segment, weight in zip(segments, weights, strict=True):
            if load + weight > limit and parts[-1]:
                parts.append([])
                load = 0
            parts[-1].append(segment)
            load += weight
        return [tuple(part) for part in parts]

    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(fill(middle)) <= stages else (middle + 1, high)
    found = fill(low)
    return _tied(found) + [()] * (stages - len(found))


def _alone(segment: Segment) -> Segment:
    return replace(segment, shared=0, ready=())


def _tied(parts: Sequence[tuple[Segment, ...]]) -> list[tuple[Segment, ...]]:
    """The same stages, with what each shares with others."""
    stage_of = [number for number, part in enumerate(parts) for _ in part]
    flat = [segment for part in parts for segment in part]
    for index, segment in enumerate(flat):
        if segment.owner is None:
            continue
        if stage_of[segment.owner] == stage_of[index]:
            flat[index] = _alone(segment)
        else:
            owner = flat[segment.owner]
            flat[segment.owner] = replace(owner, lent=owner.lent + segment.shared)
    return [tuple(one for one, at in zip(flat, stage_of, strict=True) if at == number) for number in range(len(parts))]

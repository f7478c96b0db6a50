"""One file, one model, one device, one number of processes: what every prediction is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property

from dsframe.config import Batch, Config
from dsframe.config.resolve import memory
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import Settings
from dsframe.engines import TABLE
from dsframe.tools.plan.costs import Costs, costs_of
from dsframe.tools.plan.device import Device
from dsframe.tools.plan.model import Affine, Model, Segment


@dataclass(frozen=True)
class Case:
    """What the parts of a prediction share."""

    file: DeepSpeed
    settings: Settings
    engine: str
    model: Model
    device: Device
    world_size: int
    batch: Batch

    @classmethod
    def of(cls, config: Config, engine: str, model: Model, device: Device, world_size: int) -> Case:
        """Raises ConfigError where the batch cannot be cut so."""
        batch = config.batch(world_size, replicas=TABLE[engine].replicas)
        zero = config.deepspeed.zero_optimization
        chosen = zero.fetched_elements(model.parameters + model.frozen, on_cpu=device.on_cpu)
        file = config.deepspeed.model_copy(update={"zero_optimization": zero.model_copy(update=chosen)})
        return cls(file, config.settings, engine, model, device, world_size, batch)

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
    def sequence(self) -> int:
        """Ranks that share sequences: each computes and keeps this part of a micro-batch."""
        return self.batch.sequence_parallel_size

    @property
    def data(self) -> int:
        """Ranks that average gradients, and shard what ZeRO shards: those that share sequences too."""
        return self.batch.data_parallel_size * self.sequence

    @property
    def experts(self) -> int:
        """Ranks that share a mixture's experts."""
        return 1 if self.replicas or not self.file.on("expert_parallel") else self.file.expert_parallel.autoep_size

    def at(self, grows: Affine) -> float:
        """Of this rank's part of a micro-batch."""
        return grows.at(self.rows) / self.sequence

    @property
    def rows(self) -> int:
        """Samples of a micro-batch."""
        return self.batch.micro_batch_size

    @property
    def steps(self) -> int:
        """Micro-batches of a step."""
        return self.batch.accumulation_steps

    @cached_property
    def costs(self) -> Costs:
        """What the engine says of itself."""
        return costs_of(self.engine, self.file, self.settings)

    @property
    def zero(self) -> int:
        """What is partitioned, as ZeRO counts it."""
        return self.costs.stage

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
        one = self.costs.held(self.data)
        whole = self.accumulates_whole and self.steps > 1
        return replace(one, gradient=one.gradient * self.data) if whole else one

    @property
    def accumulates_whole(self) -> bool:
        """Whether gradients that end in shares are kept whole until the last micro-batch, and reduced once."""
        return self.costs.accumulates_whole

    @property
    def gradient_bytes(self) -> float:
        """Of one gradient on its way to other ranks."""
        return self.costs.gradient_bytes(self.model.bytes_each)

    @property
    def bucket_bytes(self) -> float:
        """Of the gradients that leave together."""
        return self.costs.bucket_bytes(self.model.parameters, self.model.bytes_each, on_cpu=self.device.on_cpu)

    @property
    def zero_bucket(self) -> int:
        """Elements that ZeRO reduces at a time."""
        return self.file.zero_optimization.bucket_elements(self.model.parameters, on_cpu=self.device.on_cpu)

    @property
    def kept(self) -> bool:
        """Whether every sharded parameter is kept whole between steps."""
        return self.costs.keeps(self.model.parameters + self.model.frozen)

    @property
    def fetches(self) -> bool:
        """Whether parameters lie on the host and are copied to the device when their turn comes."""
        return self.costs.fetches and self.zero == 3 and not self.device.on_cpu

    @property
    def on_disk(self) -> bool:
        """Whether parameters lie on the host's disk and not in its memory."""
        return self.file.zero_optimization.parameter_device == "nvme"

    def block(self, part: Sequence[Segment]) -> int:
        """Elements of the largest layer of a model that is a list of them, else of what has an attention."""
        if self.model.layered:
            return max((segment.parameters for segment in part), default=0)
        return sum(segment.parameters for segment in part) // max(1, self.model.attentions)

    def unit(self, part: Sequence[Segment]) -> int:
        """Elements that FSDP gathers as one: a block, or the largest module alone where the engine chooses smaller units."""
        block, whole = self.block(part), self.model.parameters + self.model.frozen
        small = self.settings.fsdp.splits(block, whole, self.data, on_cpu=self.device.on_cpu)
        return min(block, self.fetched(part)) if small else block

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
        return self.steps * self.costs.gathers(elements, self.passes)

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

    What a layer shares with one of its own stage is there once.
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
    return replace(segment, shared=0)


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

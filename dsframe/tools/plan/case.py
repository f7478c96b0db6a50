"""One file, one model, one device, one number of processes: what a prediction is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    batch: Batch

    @classmethod
    def of(cls, config: Config, engine: str, model: Model, device: Device, world_size: int) -> Case:
        """Raises ConfigError where the batch cannot be divided so."""
        batch = config.batch(world_size, replicas=TABLE[engine].replicas)
        zero = config.deepspeed.zero_optimization
        elements = model.parameters + model.frozen
        chosen = zero.fetched_elements(elements, on_cpu=device.on_cpu)
        changes = {"zero_optimization": zero.model_copy(update=chosen)}
        file = config.deepspeed.model_copy(update=changes)
        return cls(file, config.settings, engine, model, device, batch)

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
        shared = not self.replicas and self.file.on("expert_parallel")
        return self.file.expert_parallel.autoep_size if shared else 1

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
        return costs_of(self.engine, self.file, self.settings)

    @property
    def zero(self) -> int:
        """What is sharded, as ZeRO counts it."""
        return self.costs.stage

    @property
    def passes(self) -> int:
        """Forward, backward, and forward again where activations are recomputed."""
        in_pipeline = self.stages > 1 and self.file.pipeline.activation_checkpoint_interval > 0
        return 3 if self.settings.model.activation_checkpointing or in_pipeline else 2

    @property
    def cost(self) -> memory.Cost:
        """Bytes on a rank of each parameter that its stage and its tensor shard hold."""
        cost = self.costs.held(self.data)
        whole = self.costs.accumulates_whole and self.steps > 1
        return replace(cost, gradient=cost.gradient * self.data) if whole else cost

    @property
    def gradient_bytes(self) -> float:
        """Of one gradient as it is sent."""
        return self.costs.gradient_bytes(self.model.bytes_each)

    @property
    def kept(self) -> bool:
        """True if every sharded parameter is kept whole between steps."""
        return self.costs.keeps(self.model.parameters + self.model.frozen)

    @property
    def fetches(self) -> bool:
        """True if parameters lie on the host and are copied to the device when needed."""
        return self.costs.fetches and self.zero == 3 and not self.device.on_cpu

    def block(self, part: Sequence[Segment]) -> int:
        """Elements of the largest layer of a model that is a list of them, else of what has an
        attention."""
        if self.model.layered:
            return max((segment.parameters for segment in part), default=0)
        attentions = sum(segment.attentions for segment in self.model.segments)
        return sum(segment.parameters for segment in part) // max(1, attentions)

    def fetched(self, part: Sequence[Segment]) -> int:
        """Elements that ZeRO-3 needs whole at the same time: the largest module's own; all of a
        block where that is recomputed, or compiled (``switches.units``)."""
        largest = max((segment.largest for segment in part), default=0)
        switched = self.settings.model
        if switched.activation_checkpointing or switched.compile == "blocks":
            return max(self.block(part), largest)
        return largest

    def unit(self, part: Sequence[Segment]) -> int:
        """Elements that FSDP gathers as one: a block, or where that is large its largest module."""
        block, whole = self.block(part), self.model.parameters + self.model.frozen
        on_cpu = self.device.on_cpu
        small = self.settings.fsdp.splits(block, whole, self.data, on_cpu=on_cpu)
        return min(block, self.fetched(part)) if small else block

    def gathers(self, elements: float) -> int:
        """How often in a step a sharded parameter is gathered: after the update where it is kept;
        else for each micro-batch."""
        return 1 if self.kept else self.steps * self.costs.gathers(elements, self.passes)

    @property
    def reductions(self) -> int:
        """How often in a step gradients are exchanged."""
        return self.steps if self.zero >= 2 and not self.costs.accumulates_whole else 1


def elements(part: Sequence[Segment]) -> int:
    """Trained parameters that a stage holds: its own, and copies of those that another stage owns."""
    return sum(segment.parameters + segment.shared for segment in part)


def with_frozen(part: Sequence[Segment]) -> int:
    """These and the ones that are not trained: what ZeRO-3 shards, gathers and offloads."""
    return elements(part) + sum(segment.frozen for segment in part)


def cut(segments: Sequence[Segment], stages: int) -> list[list[Segment]]:
    """Contiguous stages whose largest has as few parameters as possible (DeepSpeed's
    ``partition_method="parameters"``). A layer shares nothing with one of its own stage."""
    weights = [segment.parameters + 1 for segment in segments]

    def fill(limit: int) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        load = 0
        for index, weight in enumerate(weights):
            if load + weight > limit and parts[-1]:
                parts.append([])
                load = 0
            parts[-1].append(index)
            load += weight
        return parts

    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if len(fill(middle)) <= stages:
            high = middle
        else:
            low = middle + 1
    indexes = fill(low) if stages > 1 else [list(range(len(segments)))]
    stage_segments: list[list[Segment]] = []
    for part in indexes:
        inside = [segments[index] for index in part]
        stage_segments.append([replace(piece, shared=0) if piece.owner in part else piece for piece in inside])
    return stage_segments + [[] for _ in range(stages - len(stage_segments))]

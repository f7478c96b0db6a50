"""``zero_optimization``: what is partitioned over the data-parallel ranks and what is offloaded.

Source: ``deepspeed/runtime/zero/config.py``, ``offload_config.py`` and ``leaf_module_config.py`` of
DeepSpeed 0.19.8.
"""

from typing import ClassVar, Literal

from pydantic import Field

from dsframe.config.schema.base import Coerced, Count, Size, Unmodelled
from dsframe.config.schema.parameters import passed

SMALL = 1 << 23
"""Elements. Stage 3 keeps a model no larger than this whole (32 MiB in fp32) where the file does not say what to keep."""
PERSISTENCE = ("stage3_param_persistence_threshold", "stage3_model_persistence_threshold")
"""The keys that say what to keep."""
FETCHES = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
"""The keys that say what is gathered ahead, and what stays until it is needed again."""


Device = Literal["none", "cpu", "nvme"]


@passed
class OffloadParam(Coerced):
    """Where stage 3 keeps the parameters that are not in use. Below stage 3 it has no effect."""

    device: Device = "none"
    """``cpu``, ``nvme``, or ``none`` for no offload."""
    nvme_path: str | None = None
    """Folder on the NVMe drive. Needed when ``device`` is ``nvme``."""


@passed
class OffloadOptimizer(Coerced):
    """Where the optimizer's state lives and where its step is computed. Stages 1, 2 and 3."""

    device: Device = "none"
    """``cpu``, ``nvme`` (stage 3; stages 1 and 2 silently take ``cpu``), or ``none``. The step runs on the CPU either
    way."""
    nvme_path: str | None = None
    """Folder on the NVMe drive. Needed when ``device`` is ``nvme``."""


@passed
class LeafModule(Coerced):
    """Modules that stage 3 fetches as one piece, for example mixtures of experts."""

    wraps: ClassVar[bool] = True


@passed
class Zero(Coerced):
    """ZeRO: stage 1 partitions the optimizer state over the data-parallel ranks, stage 2 the gradients too, stage 3 the
    parameters too."""

    stage: Literal[0, 1, 2, 3] = 0
    """0 partitions nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters."""
    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they appear, against fragmentation of a GPU's memory. On CPUs stage 3 goes without, and so
    do stages 1 and 2 where the file does not say, in fp32 without offload, overlap, experts and pipelines."""
    reduce_scatter: bool = True
    """Reduce gradients by reduce-scatter, else by all-reduce."""
    reduce_bucket_size: Count = 500_000_000
    """Elements reduced at a time."""
    overlap_comm: bool | None = None
    """Reduce gradients beside the backward pass. Default: true at stage 3, else false."""
    offload_param: OffloadParam | None = None
    """Offload of the parameters. Stage 3."""
    offload_optimizer: OffloadOptimizer | None = None
    """Offload of the optimizer. Stages 1, 2 and 3."""
    zenflow: Unmodelled | None = None
    """ZenFlow. No engine accepts it."""
    stage3_prefetch_bucket_size: Size = 50_000_000
    """Parameter elements fetched ahead."""
    stage3_max_live_parameters: Size = 1_000_000_000
    """Most parameter elements on a device at a time."""
    leaf_module: LeafModule = Field(default_factory=LeafModule.model_construct)
    """Modules to fetch as one piece at stage 3."""

    @property
    def optimizer_device(self) -> Device:
        """Where the optimizer's state lives: ``none`` when it is not offloaded."""
        return self.offload_optimizer.device if self.offload_optimizer else "none"

    def keeps_whole(self, elements: int) -> bool:
        """Whether dsframe keeps all parameters of a model with so many elements on every rank between steps: the file leaves it
        to us which to keep, and there are few enough.

        They are gathered once a step then, as one; sharded are gradients, fp32 masters and the optimizer's state.
        """
        written = {*PERSISTENCE, "offload_param", "stage3_max_live_parameters", "stage3_max_reuse_distance"}
        return self.stage == 3 and not self.model_fields_set & written and elements <= SMALL

    def bucket_elements(self, elements: int, *, on_cpu: bool) -> int:
        """How many of a model's ``elements`` are reduced at a time.

        On CPUs stage 3 takes a sixteenth of the model where the file does not say: with DeepSpeed's default a model of less than
        5e8 elements holds every gradient whole until its backward pass has ended. A rank's peak was 1,261 MiB with it and 1,011
        with 5e6 (a Llama of 57 M parameters, ``benchmarks.sharded_memory``, 2 ranks).

        On GPUs DeepSpeed allocates the bucket whole, 2 GB in fp32, whatever the model: no more elements than that has are used.
        """
        if "reduce_bucket_size" in self.model_fields_set:
            return self.reduce_bucket_size
        if not on_cpu:
            return min(elements or self.reduce_bucket_size, self.reduce_bucket_size)
        if self.stage < 3 or elements <= SMALL:
            return self.reduce_bucket_size
        return min(max(elements // 16, SMALL // 4), self.reduce_bucket_size)

    def fetched_elements(self, elements: int, *, on_cpu: bool) -> dict[str, int]:
        """How many of a large model's ``elements`` are gathered ahead and kept, by key, where the file says none of it.

        With DeepSpeed's defaults a model of less than 1e9 elements is whole on each rank from its forward to its backward pass, and
        what is fetched ahead lies there twice. On CPUs stage 3 gives each layer up instead, and gathers it again: a rank's peak was
        1,015 MiB with the defaults and 720 with these (as above), of which its share of the state is 540.
        """
        written = self.stage < 3 or self.model_fields_set & set(FETCHES)
        if written or not on_cpu or elements <= 2 * SMALL:
            return {}
        ahead = elements // 16
        return dict(zip(FETCHES, (ahead, 2 * ahead, 0), strict=True))

    @property
    def parameter_device(self) -> Device:
        """Where idle parameters live: ``none`` when they are not offloaded."""
        return self.offload_param.device if self.offload_param else "none"

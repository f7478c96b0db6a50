"""``zero_optimization``: what is sharded over the data-parallel ranks and what is offloaded.

Source: ``deepspeed/runtime/zero/config.py``, ``offload_config.py`` and ``leaf_module_config.py`` of DeepSpeed 0.19.8.
"""

from typing import ClassVar, Literal

from pydantic import Field

from dsframe.config.schema.base import Coerced, Count, Size, Unmodelled
from dsframe.config.schema.parameters import passed

SMALL = 1 << 23
"""Elements (32 MiB in fp32) up to which stage 3 keeps all parameters gathered, unless the file says which to keep."""
PERSISTENCE = ("stage3_param_persistence_threshold", "stage3_model_persistence_threshold")
"""Keys that say which parameters stay gathered."""
FETCHES = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
"""Keys that say what is gathered ahead, and what stays gathered until it is used again."""


Device = Literal["none", "cpu", "nvme"]


@passed
class OffloadParam(Coerced):
    """Where stage 3 keeps unused parameters. No effect below stage 3."""

    device: Device = "none"
    """``cpu``, ``nvme``, or ``none`` for no offload."""
    nvme_path: str | None = None
    """Folder on the NVMe drive. Needed when ``device`` is ``nvme``."""


@passed
class OffloadOptimizer(Coerced):
    """Where the optimizer state is kept and the step is computed. Stages 1, 2 and 3."""

    device: Device = "none"
    """``cpu``, ``nvme`` (stage 3; stages 1 and 2 silently use ``cpu``), or ``none``. Offloaded steps run on the CPU."""
    nvme_path: str | None = None
    """Folder on the NVMe drive. Needed when ``device`` is ``nvme``."""


@passed
class LeafModule(Coerced):
    """Modules that stage 3 gathers as one unit, for example mixtures of experts."""

    wraps: ClassVar[bool] = True


@passed
class Zero(Coerced):
    """ZeRO: stage 1 shards the optimizer state over data-parallel ranks, stage 2 also gradients, stage 3 also
    parameters."""

    stage: Literal[0, 1, 2, 3] = 0
    """0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters."""
    contiguous_gradients: bool = True
    """Copy gradients into one buffer, against fragmentation of GPU memory. On CPUs skipped by stage 3, and by stages 1
    and 2 in fp32 without offload, overlap, experts and pipelines, unless the file sets the key."""
    reduce_scatter: bool = True
    """Reduce gradients by reduce-scatter, else by all-reduce."""
    reduce_bucket_size: Count = 500_000_000
    """Elements reduced at a time."""
    overlap_comm: bool | None = None
    """Reduce gradients during the backward pass. Default: true at stage 3, else false."""
    offload_param: OffloadParam | None = None
    """Parameter offload. Stage 3."""
    offload_optimizer: OffloadOptimizer | None = None
    """Optimizer offload. Stages 1, 2 and 3."""
    zenflow: Unmodelled | None = None
    """ZenFlow. No engine accepts it."""
    stage3_prefetch_bucket_size: Size = 50_000_000
    """Parameter elements gathered ahead."""
    stage3_max_live_parameters: Size = 1_000_000_000
    """Most parameter elements on a device at a time."""
    leaf_module: LeafModule = Field(default_factory=LeafModule.model_construct)
    """Modules that stage 3 gathers as one unit."""

    @property
    def optimizer_device(self) -> Device:
        """Where the optimizer state is kept; ``none`` if not offloaded."""
        return self.offload_optimizer.device if self.offload_optimizer else "none"

    def keeps_whole(self, elements: int) -> bool:
        """True if all parameters of a model of this size stay gathered: it is small, and the file does not say which to
        keep.

        They are then gathered once a step, as one. Gradients, fp32 weights and optimizer state stay sharded.
        """
        written = {*PERSISTENCE, "offload_param", "stage3_max_live_parameters", "stage3_max_reuse_distance"}
        return self.stage == 3 and not self.model_fields_set & written and elements <= SMALL

    def bucket_elements(self, elements: int, *, on_cpu: bool) -> int:
        """Returns how many of a model's ``elements`` are reduced at a time.

        On CPUs stage 3 uses a sixteenth of the model unless the file sets the key: with DeepSpeed's default a model of
        less than 5e8 elements holds all gradients until its backward pass ends. A rank's peak was 1,261 MiB with the
        default and 1,011 with 5e6 (a Llama of 57 M parameters, ``benchmarks.sharded_memory``, 2 ranks).

        On GPUs DeepSpeed allocates the full bucket, 2 GB in fp32, so it is limited to the model's size.
        """
        if "reduce_bucket_size" in self.model_fields_set:
            return self.reduce_bucket_size
        if not on_cpu:
            return min(elements or self.reduce_bucket_size, self.reduce_bucket_size)
        if self.stage < 3 or elements <= SMALL:
            return self.reduce_bucket_size
        return min(max(elements // 16, SMALL // 4), self.reduce_bucket_size)

    def fetched_elements(self, elements: int, *, on_cpu: bool) -> dict[str, int]:
        """Returns how many of a large model's ``elements`` to gather ahead and keep, by key, if the file sets none of
        these.

        With DeepSpeed's defaults a model of less than 1e9 elements is complete on each rank from its forward to its
        backward pass, and held twice where gathered ahead. On CPUs stage 3 instead frees each layer and gathers it
        again: a rank's peak was 1,015 MiB with the defaults and 720 with these (as above), including 540 for its shard
        of the state.
        """
        written = self.stage < 3 or self.model_fields_set & set(FETCHES)
        if written or not on_cpu or elements <= 2 * SMALL:
            return {}
        ahead = elements // 16
        return dict(zip(FETCHES, (ahead, 2 * ahead, 0), strict=True))

    @property
    def parameter_device(self) -> Device:
        """Where unused parameters are kept; ``none`` if not offloaded."""
        return self.offload_param.device if self.offload_param else "none"

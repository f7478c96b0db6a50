"""``zero_optimization``: what is partitioned over the data-parallel ranks and what is offloaded.

Source: ``deepspeed/runtime/zero/config.py``, ``offload_config.py`` and ``leaf_module_config.py`` of
DeepSpeed 0.19.8.
"""

import sys
from typing import Literal

from pydantic import Field

from dsframe.config.schema.base import Coerced, Count, Size, Unmodelled
from dsframe.config.schema.zero_offload import Device, LeafModule, OffloadOptimizer, OffloadParam

SMALL = 1 << 23
"""Elements. Stage 3 keeps a model no larger than this whole (32 MiB in fp32) where the file does not say what to keep."""
PERSISTENCE = ("stage3_param_persistence_threshold", "stage3_model_persistence_threshold")
"""The keys that say what to keep."""
FETCHES = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
"""The keys that say what is gathered ahead, and what stays until it is needed again."""


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
    use_multi_rank_bucket_allreduce: bool = True
    """Merge the buckets of several ranks into one all-reduce. For small models on many GPUs."""
    allgather_partitions: bool = True
    """Gather updated parameters by all-gather, else by a series of broadcasts."""
    allgather_bucket_size: Size = 500_000_000
    """Elements gathered at a time."""
    overlap_comm: bool | None = None
    """Reduce gradients beside the backward pass. Default: true at stage 3, else false."""
    compute_grad_norm: bool = True
    """Compute the global gradient norm. False only at stages 1 and 2, without clipping."""
    load_from_fp32_weights: bool = True
    """Start the fp32 weights from the checkpoint's fp32 copy, else from its 16-bit weights."""
    elastic_checkpoint: bool = False
    """Old elastic checkpoints. No effect at stage 3, and none was measured elsewhere: use a Universal checkpoint."""
    offload_param: OffloadParam | None = None
    """Offload of the parameters. Stage 3."""
    offload_optimizer: OffloadOptimizer | None = None
    """Offload of the optimizer. Stages 1, 2 and 3."""
    zenflow: Unmodelled | None = None
    """ZenFlow. No engine accepts it."""
    sub_group_size: Size = 1_000_000_000
    """Elements that one optimizer step handles at a time at stage 3."""
    cpu_offload_param: bool | None = None
    """Deprecated: ``"offload_param": {"device": "cpu"}``."""
    cpu_offload_use_pin_memory: bool | None = None
    """Deprecated and without effect: ``pin_memory`` under ``offload_optimizer`` and ``offload_param``."""
    cpu_offload: bool | None = None
    """Deprecated: ``"offload_optimizer": {"device": "cpu"}``."""
    stage3_prefetch_bucket_size: Size = 50_000_000
    """Parameter elements fetched ahead."""
    stage3_param_persistence_threshold: Size = 100_000
    """Parameters with fewer elements stay on every rank. Where the file names neither
    this nor another limit of what is kept, all of a model of up to 8,388,608 parameters stays."""
    stage3_model_persistence_threshold: Size = sys.maxsize
    """Most elements that may stay on every rank in all."""
    stage3_max_live_parameters: Size = 1_000_000_000
    """Most parameter elements on a device at a time."""
    stage3_max_reuse_distance: Size = 1_000_000_000
    """A parameter needed again within so many elements is kept."""
    stage3_gather_16bit_weights_on_model_save: bool = False
    """Let ``save_16bit_model()`` gather the whole model; without it nothing is written at stage 3."""
    stage3_module_granularity_threshold: int = 0
    """Modules with fewer parameters per submodule are fetched as one piece. 0: never."""
    stage3_use_all_reduce_for_fetch_params: bool = False
    """Fetch parameters by all-reduce."""
    stage3_allgather_sequential: bool = False
    """Fetch parameters one by one, without a bucket: less memory."""
    stage3_gather_fp16_weights_on_model_save: bool = False
    """Deprecated: ``stage3_gather_16bit_weights_on_model_save``."""
    ignore_unused_parameters: bool = True
    """False: stop when a parameter gets no gradient. Stage 2."""
    legacy_stage1: bool = False
    """The stage 1 of before DeepSpeed 0.5.9. True makes DeepSpeed raise."""
    round_robin_gradients: bool = False
    """Share the copies of gradients to the CPU evenly. Stages 1 and 2 with CPU offload."""
    parameter_alignment: bool = False
    """Start each parameter of the flat buffers at a multiple of 16 bytes. Stages 1 and 2."""
    zero_hpz_partition_size: Size = 1
    """Ranks in a secondary partition of the parameters (ZeRO++ hpZ). No engine accepts it."""
    zero_quantized_weights: bool = False
    """All-gather int8 weights (ZeRO++ qwZ). No engine accepts it."""
    zero_quantized_nontrainable_weights: bool = False
    """Keep frozen weights in int8. No engine accepts it."""
    zero_quantized_gradients: bool = False
    """Reduce int4 gradients by all-to-all (ZeRO++ qgZ). No engine accepts it."""
    memory_efficient_linear: bool = True
    """A linear layer that keeps fewer activations. Stage 3."""
    pipeline_loading_checkpoint: bool = False
    """Load a checkpoint in pipeline mode. Stage 3."""
    override_module_apply: bool = True
    """Let ``nn.Module.apply`` see whole parameters. Stage 3."""
    log_trace_cache_warnings: bool = False
    """Warn when the order of modules changes between steps. Stage 3."""
    enable_sanity_checks: bool = False
    """Extra checks inside DeepSpeed."""
    save_muon_momentum_buffer_in_memory: bool = False
    """Keep Muon's momentum in memory although the optimizer state goes to NVMe. Stage 3."""
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

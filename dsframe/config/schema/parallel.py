# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""How one model is split over processes: pipeline, tensor parallel, expert parallel, hybrid engine.

Source: ``deepspeed/runtime/tensor_parallel/config.py``, ``module_inject/autotp_config.py``,
``module_inject/auto_ep_config.py``, ``runtime/config.py`` and ``runtime/pipe/engine.py`` of DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from dsframe.config.schema.base import AUTO, Count, Real, Section, Size

Preset = Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"]


class Pipeline(Section):
    """Pipeline parallelism. DeepSpeed parses ``stages``, ``partition`` and ``seed_layers`` and ignores them; dsframe
    honours them."""

    stages: Count = 1
    """Number of pipeline stages. Divides the world size. ``"auto"`` is 1."""
    partition: str = "parameters"
    """How layers are shared out: ``parameters``, ``uniform`` or ``type:REGEX`` (class names). ``best`` is
    ``parameters``."""
    seed_layers: bool = False
    """Seed each layer's random numbers (dropout) by its index at each forward pass. Weights never depend on the stages."""
    activation_checkpoint_interval: Size = 0
    """Layers between two activation checkpoints, the rest is recomputed. 0: none."""
    pipe_partitioned: bool = True
    """Send activations partitioned over tensor-parallel ranks."""
    grad_partitioned: bool = True
    """Send gradients partitioned over tensor-parallel ranks."""
    use_reentrant: bool = True
    """torch's reentrant checkpointing, which raises where the first stage's inputs are integers: dsframe always takes the
    other one."""


class LayerSpec(Section):
    """Which layers are cut, and how."""

    patterns: list[str] = []
    """Regular expressions for parameter names."""
    partition_type: Literal["column", "row", "skip"] = "column"
    """Cut the outputs, the inputs, or nothing."""
    shape: list[Any] | None = None
    """Shape in which a merged weight is seen, such as ``[2, -1]``."""
    partition_dim: int | None = None
    """Dimension of ``shape`` that is cut."""
    gather_output: bool = False
    """Gather a column layer's output."""
    grad_allreduce: bool = False
    """All-reduce the gradient of what is not cut."""
    model_types: list[str] | None = None
    """Only for these ``config.model_type``s."""

    folded: ClassVar[Mapping[str, str]] = {"partition_type": "lower"}


class PartitionConfig(Section):
    """Tensor parallelism by rules of your own."""

    tp_size: Count = 1
    """Replaced by ``autotp_size``."""
    use_default_specs: bool = True
    """Add the preset's rules."""
    strict_mode: bool = False
    """Raise when a layer matches no rule."""
    embedding_partition_dim: int = 1
    """Dimension of embeddings that is cut."""
    lm_head_patterns: list[str] = ["lm_head", "embed_out"]
    """Names of output layers."""
    layer_specs: list[LayerSpec] = []
    """The rules; the first that matches counts."""


class TensorParallelGroup(Section):
    """Lower-level settings."""

    coerced: ClassVar[bool] = True

    tp_size: Count = 1
    """Must agree with ``autotp_size``."""
    tp_grain_size: int = 1
    """Not used in training."""


class TensorParallel(Section):
    """Tensor parallelism for training (AutoTP). Ranks of one group must read the same batches."""

    coerced: ClassVar[bool] = True

    autotp_size: Size = 0
    """Ranks that share each layer. 0: off. Divides the world size and the number of heads."""
    tp_overlap_comm: bool = False
    """Communicate beside computation (all-reduce only)."""
    vocab_parallel_lm_head: bool | None = None
    """Cut the output layer by vocabulary. Default: what the model's own plan says."""
    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
    """Cross-entropy over a cut vocabulary."""
    tp: TensorParallelGroup = Field(default_factory=TensorParallelGroup.model_construct)
    """Lower-level settings."""
    injection_policy_tuple: list[Any] | None = None
    """Names of layers whose outputs are all-reduced."""
    partition_config: PartitionConfig | None = None
    """Rules of your own, for models that DeepSpeed does not know."""
    preset_model: str | None = None
    """Rules of a known model: llama, bloom, chatglm, mixtral, deepseek_v2, qwen2, phi3."""
    keep_module_on_host: bool = False
    """Leave the weights on the CPU when a checkpoint is loaded."""
    kernel_inject: bool = False
    """Inference kernels. Not for training."""


class ExpertParallel(Section):
    """AutoEP: the experts of a mixture-of-experts model over several ranks."""

    nullable: ClassVar[bool] = True

    enabled: bool = False
    """Turns it on."""
    autoep_size: Count = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: Count = 1
    """Ranks that share one expert."""
    validate_folding_routing: bool = False
    """Check that folded ranks route alike."""
    async_split_plan: bool = False
    """Exchange the split sizes beside computation. Not with tensor parallelism."""
    preset_model: str | None = None
    """Name patterns of a known model."""
    moe_layer_pattern: str | None = None
    """Regular expression for mixture-of-experts layers."""
    expert_pattern: str | None = None
    """Name of the experts inside such a layer."""
    router_pattern: str | None = None
    """Name of the router inside such a layer."""
    use_grouped_mm: bool = True
    """One grouped matrix product for all experts of a rank."""
    disable_triton_grouped_mm: bool = False
    """Avoid the Triton kernel for it."""
    route_norm: bool | None = None
    """Normalise the chosen experts' weights. Default: the preset's."""
    route_scale: Real = 1.0
    """Factor on the routing weights."""
    score_apply: Literal["auto", "pre", "post"] = AUTO
    """Weight the experts' inputs or outputs."""
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = AUTO
    """How experts' outputs are combined."""
    row_weighting_impl: Literal["auto", "eager", "fused"] = AUTO
    """How rows are weighted."""
    gate_up_impl: Literal["separate", "fused"] = "separate"
    """Gate and up projection as two products or one."""
    comm_backend: Literal["comm", "deepep"] = "comm"
    """Collectives of torch, or DeepEP."""
    comm_num_sm: int = 12
    """Multiprocessors for DeepEP."""
    comm_qp_margin: int = 4
    """Queue pairs beyond the multiprocessors, for DeepEP."""
    comm_max_tokens_per_rank: Size = 0
    """Tokens for which DeepEP keeps buffers. 0: found by running."""
    num_expert_groups: int | None = None
    """Groups of experts in grouped routing."""
    num_limited_groups: int | None = None
    """Groups a token may choose from."""
    score_func: Literal["auto", "softmax", "sigmoid"] = AUTO
    """Function on the router's scores."""
    top_k: int | Literal["auto"] = AUTO
    """Experts for each token."""
    load_balance_coeff: None = None
    """Not supported: only null."""
    routed_scaling_factor: Real | Literal["auto"] = AUTO
    """Factor on the experts' sum."""
    expert_w1: str | None = None
    """Name of the gate weight."""
    expert_w2: str | None = None
    """Name of the down weight."""
    expert_w3: str | None = None
    """Name of the up weight; null where gate and up are one, absent for the preset's."""
    num_experts_attr: str | None = None
    """Attribute that holds the number of experts."""
    top_k_attr: str | None = None
    """Attribute that holds ``top_k``."""
    has_shared_experts: bool | None = None
    """The layer has shared experts."""
    shared_experts_pattern: str | None = None
    """Their name."""
    shared_experts_gate_pattern: str | None = None
    """Their gate's name."""
    expert_activation: str | None = None
    """Activation of the experts. Default: the preset's."""


class HybridEngine(Section):
    """One engine that trains and generates, for RLHF."""

    coerced: ClassVar[bool] = True

    enabled: bool = False
    """Turns it on."""
    max_out_tokens: Count = 512
    """Longest prompt and answer together."""
    inference_tp_size: int = 1
    """Tensor-parallel ranks while generating."""
    release_inference_cache: bool = False
    """Free the cache after generating."""
    pin_parameters: bool = True
    """Keep inference parameters at fixed addresses."""
    tp_gather_partition_size: int = 8
    """Parameters gathered at a time while generating."""
    enable_cuda_graph: bool = False
    """CUDA graphs while generating."""

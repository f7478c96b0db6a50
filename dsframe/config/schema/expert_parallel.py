"""Mixtures of experts whose experts are spread over ranks. Sources: as for ``parallel``."""

from typing import ClassVar, Literal

from dsframe.config.schema.base import AUTO, Count, Real, Section, Size


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

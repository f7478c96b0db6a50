"""Rules about expert parallelism: which keys would change what is computed, and what DeepSpeed excludes."""

from __future__ import annotations

from dsframe.config.rules.context import RuleContext

_SECTION = "expert_parallel"
_ZERO = "zero_optimization"
KINDS = ("mixtral", "qwen3_moe")
"""transformers' model types whose experts AutoEP can spread over ranks here; each is compared with one process by a test."""
_COMPUTES = (
    "route_norm", "route_scale", "score_apply", "num_expert_groups", "num_limited_groups", "score_func", "top_k",
    "routed_scaling_factor", "expert_activation",
)  # fmt: skip
_NAMES = (
    "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2", "expert_w3", "num_experts_attr",
    "top_k_attr", "has_shared_experts", "shared_experts_pattern", "shared_experts_gate_pattern",
)  # fmt: skip
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def check(context: RuleContext) -> None:
    """Report what is wrong with ``expert_parallel``."""
    if not context.file.on(_SECTION):
        return
    experts, zero, stage = context.file.expert_parallel, context.zero, context.stage
    _refuse(context, _COMPUTES, "would change what the model computes, on engine deepspeed only: set it in the model")
    if not context.by_deepspeed or context.fails(_SECTION):
        return  # engines of full replicas spread nothing
    _refuse(context, _NAMES, "not supported: checkpoints have the names of the models that dsframe knows")
    if experts.expert_tensor_parallel_size > 1:
        context.conflict(f"{_SECTION}.expert_tensor_parallel_size", "above 1 DeepSpeed raises")
    for key, wrong in (
        ("contiguous_gradients", stage == 2 and not zero.contiguous_gradients),
        ("reduce_scatter", stage in (1, 2) and not zero.reduce_scatter),
        ("zero_hpz_partition_size", stage == 3 and zero.zero_hpz_partition_size > 1),
        ("zenflow", zero.zenflow is not None),
        *((key, stage and getattr(zero, key)) for key in _QUANTIZED),
    ):
        if wrong:
            context.conflict(f"{_ZERO}.{key}", f"not possible with expert_parallel at stage {stage}: DeepSpeed raises")


def _refuse(context: RuleContext, names: tuple[str, ...], message: str) -> None:
    for key in names:
        if context.wrote(f"{_SECTION}.{key}"):
            context.conflict(f"{_SECTION}.{key}", message)

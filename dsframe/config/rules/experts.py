"""Rules about expert parallelism: which keys would change what is computed."""

from __future__ import annotations

from dsframe.config.rules.context import RuleContext

_SECTION = "expert_parallel"
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


def check(context: RuleContext) -> None:
    """Report what is wrong with ``expert_parallel``."""
    if not context.file.on(_SECTION):
        return
    _refuse(context, _COMPUTES, "would change what the model computes, on engine deepspeed only: set it in the model")
    if context.by_deepspeed:  # engines of full replicas spread nothing
        _refuse(context, _NAMES, "not supported: checkpoints have the names of the models that dsframe knows")


def _refuse(context: RuleContext, names: tuple[str, ...], message: str) -> None:
    for key in names:
        if context.wrote(f"{_SECTION}.{key}"):
            context.conflict(f"{_SECTION}.{key}", message)

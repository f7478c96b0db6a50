"""Rules about expert parallelism: which keys would change what is computed, and what excludes it."""

from __future__ import annotations

from collections.abc import Iterable

from dsframe.config.rules.context import RuleContext
from dsframe.config.rules.model import PER_TENSOR

_SECTION = "expert_parallel"
_SIZE = (_SECTION, "autoep_size")
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
_ZERO = "zero_optimization"


def check(context: RuleContext) -> None:
    """Report what is wrong with ``expert_parallel``."""
    if not context.file.on(_SECTION):
        return
    _keys(
        context,
        _COMPUTES,
        "would change what the model computes, on engine deepspeed alone; the model's own settings say it",
    )
    experts = context.file.expert_parallel
    if experts.comm_backend == "deepep" and experts.comm_max_tokens_per_rank == 0:
        context.conflict(
            (_SECTION, "comm_backend"), '"deepep" needs comm_max_tokens_per_rank: DeepSpeed raises',
            "add micro-batch size x longest sequence",
        )  # fmt: skip
    if not context.by_deepspeed or context.findings.fails((_SECTION,)):
        return  # engines of full replicas spread nothing
    _keys(context, _NAMES, "not supported: checkpoints have the names of the models that dsframe knows")
    if experts.expert_tensor_parallel_size > 1:
        context.conflict((_SECTION, "expert_tensor_parallel_size"), "above 1 DeepSpeed raises", "remove it")
    _splits(context)
    _training(context)
    _placement(context)


def _keys(context: RuleContext, keys: Iterable[str], message: str) -> None:
    for key in keys:
        if context.wrote(_SECTION, key):
            context.conflict((_SECTION, key), message, "remove it")


def _splits(context: RuleContext) -> None:
    """Report other ways to split the model."""
    file = context.file
    others = {
        "a pipeline": file.pipeline.stages > 1,
        "tensor parallelism": file.tensor_parallel.autotp_size > 1,
        "sequence parallelism": (file.sequence_parallel_size or 1) > 1,
    }
    for what, is_on in others.items():
        if is_on:
            context.conflict(
                _SIZE, f"not possible with {what}: dsframe has no test that shows them equal", "remove one of them"
            )


def _training(context: RuleContext) -> None:
    """Report what else would train otherwise, or not at all."""
    file = context.file
    kind = file.optimizer.type.lower() if file.optimizer else ""
    if kind in PER_TENSOR:
        context.conflict(
            _SIZE, f"{kind.capitalize()} computes each update from the full weight: experts of a rank would train differently",
            "choose another optimizer",
        )  # fmt: skip
    if file.gradient_allreduce_op == "sum":
        context.conflict(
            _SIZE,
            "not possible with sums: DeepSpeed averages experts' gradients",
            'write "gradient_allreduce_op": "mean"',
        )
    short = "bf16" if file.bf16.enabled else "fp16" if file.fp16.enabled else ""
    if short and not file.zero_optimization.stage:
        context.conflict(
            _SIZE, f"not possible at stage 0 with {short}: DeepSpeed averages the ranks' gradient norms, which differ",
            'write "zero_optimization": {"stage": 1}',
        )  # fmt: skip
    if file.dsframe.adapter is not None:
        context.conflict(
            _SIZE, "not possible with an adapter: AutoEP does not know its layers' names", "remove one of them"
        )
    if file.dsframe.model.compile:
        context.conflict(
            _SIZE, "not possible with dsframe.model.compile: a compiled block cannot communicate", "remove one of them"
        )


def _placement(context: RuleContext) -> None:
    """Report ways to place state that AutoEP refuses, or that nobody has compared."""
    zero = context.file.zero_optimization
    if zero.stage == 2 and zero.contiguous_gradients is False:
        context.conflict(
            (_ZERO, "contiguous_gradients"), "with expert_parallel DeepSpeed raises at stage 2", "remove it"
        )
    if zero.stage in (1, 2) and not zero.reduce_scatter:
        context.conflict(
            (_ZERO, "reduce_scatter"), "with expert_parallel DeepSpeed raises at stages 1 and 2", "remove it"
        )
    if zero.stage == 3 and zero.zero_hpz_partition_size > 1:
        context.conflict((_ZERO, "zero_hpz_partition_size"), "with expert_parallel DeepSpeed raises", "remove it")
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if zero.stage and getattr(zero, key):
            context.conflict(
                (_ZERO, key), "not possible with expert_parallel: DeepSpeed raises at stage 3", "remove it"
            )
    if zero.zenflow is not None:
        context.conflict(
            (_ZERO, "zenflow"), "not possible with expert_parallel: it makes groups of its own", "remove it"
        )
    if context.file.dsframe.model.tiling is not None:
        context.conflict(("dsframe", "model", "tiling"), "not possible with expert_parallel", "remove it")

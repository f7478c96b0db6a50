"""Tensor parallelism by DeepSpeed's AutoTP: its configuration, and checks of what it does not support.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (_apply_autotp_partitioning),
``module_inject/{auto_tp,tp_plan_converter}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from dsframe.engines.deepspeed import state_tensor
from dsframe.engines.deepspeed.imports import SUPPORTED_STYLES, _get_hf_tp_plan, groups
from dsframe.errors import EngineError
from dsframe.model.plan import Plan

_HEADS = ("num_attention_heads", "num_key_value_heads")
_REMEDY = 'say in "tensor_parallel": {"partition_config": ...} which layers to shard, and how'


def completed(section: Mapping[str, Any], model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Returns the ``tensor_parallel`` section that DeepSpeed gets for ``model``, which is not split yet.

    - Which layers are split: as the file says, else the task, else transformers for its model.
    - The output layer's scores are gathered, because the task's loss takes all of them.

    Raises EngineError if none of them says how to split the model, or if its heads do not divide.
    """
    size = plan.batch.tensor_parallel_size
    completed = {**section, "vocab_parallel_lm_head": False}
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise EngineError(f"tensor_parallel: {name} {heads} is not divisible by autotp_size {size}; choose another")
    if completed.get("partition_config") or completed.get("preset_model"):
        return completed
    if plan.task.partition_config is not None:
        return {**completed, "partition_config": {**plan.task.partition_config, "use_default_specs": False}}
    what, styles = type(model).__name__, _get_hf_tp_plan(model)
    if not styles:
        raise EngineError(f"tensor_parallel: nothing says how to shard a {what}; {_REMEDY}")
    if unknown := sorted(set(styles.values()) - SUPPORTED_STYLES):
        ways = ", ".join(unknown)
        raise EngineError(
            f"tensor_parallel: transformers shards a {what} in ways unknown to DeepSpeed ({ways}); {_REMEDY}"
        )
    return completed


def cuts(model: nn.Module) -> dict[str, state_tensor.Cut]:
    """Returns how DeepSpeed has split ``model``. Raises EngineError if it has split nothing, or what it cannot train."""
    cut = state_tensor.cuts(model)
    if not cut:
        raise EngineError(
            "tensor_parallel: no layer matches partition_config, so nothing is sharded; correct its patterns"
        )
    # A split embedding has a split output, and DeepSpeed counts only one of its shares in the gradient norm.
    for name, parameter in model.named_parameters():
        if name in cut and not getattr(parameter, "tensor_model_parallel", False):
            raise EngineError(
                f"tensor_parallel: partition_config shards {name}; DeepSpeed can do that for inference only; leave it out"
            )
    return cut


def group() -> dist.ProcessGroup:
    """Returns DeepSpeed's group of ranks that split this rank's layers."""
    return cast(dist.ProcessGroup, groups.get_tensor_model_parallel_group())

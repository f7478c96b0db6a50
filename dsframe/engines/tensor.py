"""Tensor parallelism by DeepSpeed's AutoTP: what it is told, and what it cannot do, found before it starts.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (_apply_autotp_partitioning), ``module_inject/{auto_tp,tp_plan_converter}.py``.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import nn

from dsframe.engine import Plan
from dsframe.engines import state_tensor
from dsframe.engines.library import SUPPORTED_STYLES, _get_hf_tp_plan, groups
from dsframe.errors import EngineError

_HEADS = ("num_attention_heads", "num_key_value_heads")
_REMEDY = 'say in "tensor_parallel": {"partition_config": ...} which layers are cut, and how'


def prepare(document: dict[str, Any], model: nn.Module, plan: Plan) -> None:
    """Completes what is handed to DeepSpeed for ``model``, which is still whole.

    * DeepSpeed finds the size of the global batch itself: it counts tensor-parallel ranks as data parallel at stages 0 to 2,
      and not at stage 3 (``train_batch_size`` is 8 and then 4 with a micro-batch of 4 on 2 ranks that share a model).
    * Which layers are cut: what the file says, else what the task says, else what transformers says of its model.
    * The output layer's scores are gathered, because the task's loss takes all of them.

    Raises EngineError where nobody says how to cut the model, or its heads do not divide.
    """
    size = plan.batch.tensor_parallel_size
    document.pop("train_batch_size", None)
    section = document["tensor_parallel"]
    section["vocab_parallel_lm_head"] = False
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise EngineError(f"tensor_parallel: {name} {heads} is not divisible by autotp_size {size}; choose another")
    if section.get("partition_config") or section.get("preset_model"):
        return
    if plan.task.partition_config is not None:
        section["partition_config"] = {**plan.task.partition_config, "use_default_specs": False}
        return
    what, styles = type(model).__name__, _get_hf_tp_plan(model)
    if not styles:
        raise EngineError(f"tensor_parallel: nothing says how to cut a {what}; {_REMEDY}")
    if strange := sorted(set(styles.values()) - SUPPORTED_STYLES):
        raise EngineError(
            f"tensor_parallel: transformers cuts a {what} in ways unknown to DeepSpeed ({', '.join(strange)}); {_REMEDY}"
        )


def cuts(model: nn.Module) -> dict[str, state_tensor.Cut]:
    """How DeepSpeed has cut ``model``. Raises EngineError where it has cut nothing, or what it cannot train."""
    found = state_tensor.cuts(model)
    if not found:
        raise EngineError("tensor_parallel: no layer matches partition_config, so nothing is cut; mend its patterns")
    for name, parameter in model.named_parameters():
        # An embedding that is cut: its output stays cut as well, and DeepSpeed leaves all shares but one out of the norm.
        if name in found and not getattr(parameter, "tensor_model_parallel", False):
            raise EngineError(
                f"tensor_parallel: partition_config cuts {name}, which DeepSpeed can do for inference only; leave it out"
            )
    return found


def group() -> dist.ProcessGroup:
    """The ranks among which this rank's layers are cut."""
    return cast(dist.ProcessGroup, groups.get_tensor_model_parallel_group())

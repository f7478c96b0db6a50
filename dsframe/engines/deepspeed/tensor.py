"""Tensor parallelism by DeepSpeed's AutoTP: what it is told, and what it cannot do, found before it starts.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (_apply_autotp_partitioning), ``module_inject/{auto_tp,tp_plan_converter}.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from dsframe.engines.deepspeed import patches, state_tensor, tensor_trial
from dsframe.engines.deepspeed.imports import (
    SUPPORTED_STYLES,
    AutoTP,
    TPTrainingConfig,
    _get_hf_tp_plan,
    configure_tensor_parallel_runtime,
    deepspeed,
    groups,
)
from dsframe.errors import EngineError
from dsframe.model.plan import Plan

_HEADS = ("num_attention_heads", "num_key_value_heads")
_REMEDY = 'say in "tensor_parallel": {"partition_config": ...} which layers to shard, and how'


def completed(section: Mapping[str, Any], model: nn.Module, plan: Plan) -> dict[str, Any]:
    """The ``tensor_parallel`` section as DeepSpeed gets it for ``model``, which is not split yet.

    * Which layers are split: what the file says, else what the task says, else what transformers says of its model.
    * The output layer's scores are gathered, because the task's loss takes all of them.

    Raises EngineError where nobody says how to split the model, or its heads do not divide.
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
    if strange := sorted(set(styles.values()) - SUPPORTED_STYLES):
        ways = ", ".join(strange)
        raise EngineError(
            f"tensor_parallel: transformers shards a {what} in ways unknown to DeepSpeed ({ways}); {_REMEDY}"
        )
    return completed


def cut_stage(stage: Any, section: Mapping[str, Any], plan: Plan, among: dist.ProcessGroup) -> None:
    """Cuts the layers of a pipeline stage among the ranks of a group.

    DeepSpeed's engine would do so with groups that know nothing of stages: gradients would be added up over ranks that hold
    other layers. Cut beforehand, with the pipeline's own groups, they are not, and its norm counts each share once.
    """
    rules = TPTrainingConfig(**completed(section, stage, plan))
    deepspeed.set_autotp_mode(training=True)
    configure_tensor_parallel_runtime(rules)
    auto = AutoTP(
        module=stage,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=rules.get_partition_config_object(),
        training_mode=True,
    )
    with tensor_trial.whole_layers(stage):
        patches.split_by(auto, among, plan.batch.tensor_parallel_size, stage)
    _refuse_embeddings(stage, state_tensor.cuts(stage))


def cuts(model: nn.Module) -> dict[str, state_tensor.Cut]:
    """How DeepSpeed has cut ``model``. Raises EngineError where it has cut nothing, or what it cannot train."""
    cut = state_tensor.cuts(model)
    refuse_nothing(bool(cut))
    _refuse_embeddings(model, cut)
    return cut


def refuse_nothing(cut: bool) -> None:
    """Raises EngineError unless something was ``cut``."""
    if not cut:
        raise EngineError(
            "tensor_parallel: no layer matches partition_config, so nothing is sharded; correct its patterns"
        )


def _refuse_embeddings(model: nn.Module, cut: Mapping[str, state_tensor.Cut]) -> None:
    """An embedding that is cut gives a cut output, and DeepSpeed leaves all its shares but one out of the gradients' norm."""
    for name, parameter in model.named_parameters():
        if name in cut and not getattr(parameter, "tensor_model_parallel", False):
            raise EngineError(
                f"tensor_parallel: partition_config shards {name}; DeepSpeed can do that for inference only; leave it out"
            )


def group() -> dist.ProcessGroup:
    """The ranks among which this rank's layers are cut, by DeepSpeed itself."""
    return cast(dist.ProcessGroup, groups.get_tensor_model_parallel_group())

"""Checks for what DeepSpeed does not support."""

from __future__ import annotations

import sys

from torch import nn

from dsframe.engines import after_step
from dsframe.errors import EngineError
from dsframe.model.build import without_elements
from dsframe.model.gradient_hooks import GradientHooks
from dsframe.model.plan import Plan


def refuse_after_step(plan: Plan) -> None:
    """Raises EngineError if the task writes to weights after updates, but no rank can gather a whole weight."""
    file, batch = plan.config.deepspeed, plan.batch
    splits = {
        "a pipeline": file.pipeline.stages > 1,
        "tensor parallelism": batch.tensor_parallel_size > 1,
        "experts over ranks": file.on("expert_parallel"),
        "optimizer states on NVMe": file.zero_optimization.optimizer_device == "nvme",
    }
    if after_step.overridden(plan.task) and any(splits.values()):
        raise EngineError(
            f"{type(plan.task).__name__}.after_step: not possible with {' and '.join(what for what, on in splits.items() if on)}, "
            "where no rank can gather a whole weight; take it out, or leave out after_step"
        )


def refuse_gradient_hooks(plan: Plan, hooks: GradientHooks) -> None:
    """Raises EngineError for hooks on gradients that are split between ranks."""
    splits = {
        "tensor_parallel": plan.batch.tensor_parallel_size > 1,
        "expert_parallel": plan.config.deepspeed.on("expert_parallel"),
    }
    if sections := [section for section, on in splits.items() if on and hooks]:
        raise EngineError(
            f"{sections[0]}: a rank has a part of the gradients, and {', '.join(hooks)} has a hook on the whole one; train "
            f"without {sections[0]}"
        )


def refuse_compiled(model: nn.Module) -> None:
    """Raises EngineError if a part of ``model`` is already compiled: ZeRO-3 then cannot gather its weights (deepspeed
    0.19.8, ``runtime/zero/parameter_offload.py``, ZeROOrderedDict)."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # imported if something was compiled
    wrapper = dynamo.OptimizedModule if dynamo is not None else ()
    if any(isinstance(module, wrapper) or module._compiled_call_impl is not None for module in model.modules()):
        raise EngineError(
            "ZeRO stage 3 cannot gather the weights of a module that is compiled already: leave torch.compile out of the "
            'model, and write "dsframe": {"model": {"compile": true}}'
        )


def refuse_empty(model: nn.Module) -> None:
    """Raises EngineError for parameters without elements, which stage 3 cannot shard."""
    if names := without_elements(model):
        raise EngineError(
            f"ZeRO stage 3 cannot shard {names}, which has no elements; leave it out of the model, or choose a lower stage"
        )

"""Expert parallelism by DeepSpeed's AutoEP: configuration and supported models. Names and state: ``state_experts``.

A rank routes its own samples' tokens; an all-to-all sends each token to the rank of its expert and back. For everything
except experts this is data parallelism. Source: deepspeed 0.19.8, ``runtime/engine.py`` (_configure_expert_parallel).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from dsframe.config.rules.experts import KINDS
from dsframe.engines.deepspeed.imports import configure_moe_param_groups, groups
from dsframe.engines.deepspeed.replaced import OwnParts, replacing
from dsframe.errors import EngineError
from dsframe.model.gathered import LIBRARIES
from dsframe.model.plan import Plan

_WITHOUT = "leave it out of the model, or train without expert_parallel"
_PLAIN = ("transformers.", "torch.")
_COUNTS = ("num_local_experts", "num_experts")


def refuse_unsupported(plan: Plan, model: nn.Module) -> None:
    """Raises EngineError if ``model``'s experts cannot be distributed over the ranks as the file says, or if AutoEP's
    layers would compute something else than the model's."""
    size = plan.config.deepspeed.expert_parallel.autoep_size
    if plan.world.size % size:
        raise EngineError(
            f"expert_parallel: {plan.world.size} processes are not divisible by autoep_size {size}; start another number"
        )
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", type(model).__name__)
    if model_type not in KINDS:
        raise EngineError(
            f'expert_parallel: "{model_type}" is not a model whose experts dsframe can spread over ranks; '
            f"remove expert_parallel, or train one of {', '.join(KINDS)}"
        )
    preset = plan.config.deepspeed.expert_parallel.preset_model
    if preset not in (None, model_type):
        raise EngineError(
            f'expert_parallel: preset_model "{preset}" is for another model than "{model_type}"; remove it'
        )
    count = next(number for name in _COUNTS if (number := getattr(config, name, None)) is not None)
    if count % size:
        raise EngineError(f"expert_parallel: {count} experts are not divisible by autoep_size {size}; choose another")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise EngineError(
            f'expert_parallel: AutoEP\'s experts compute "silu", not this model\'s "{config.hidden_act}"; remove expert_parallel'
        )
    if getattr(config, "router_jitter_noise", 0.0):
        raise EngineError("expert_parallel: AutoEP's router has no router_jitter_noise; remove one of them")
    weights = [weight for name, weight in model.named_parameters() if ".experts." in name]
    if weights and not any(weight.requires_grad for weight in weights):
        raise EngineError("expert_parallel: all experts are frozen, and DeepSpeed raises; remove expert_parallel")


class ExpertShards(OwnParts):
    """Experts that AutoEP has distributed over ranks."""

    never_whole = "use weight_decay for a penalty, or train without expert_parallel"

    def cuts(self, weight: Any) -> bool:
        """True for an expert's weight."""
        return getattr(weight, "allreduce", True) is False


LIBRARIES.insert(0, ExpertShards())


def whole_blocks(model: nn.Module) -> AbstractContextManager[None]:
    """Encloses AutoEP's work on ``model``. Raises EngineError for blocks that it cannot replace."""
    return replacing(model, "expert_parallel", lambda layer: type(layer).__module__.startswith(_PLAIN), _WITHOUT)


def prepared(build: Callable[[Any], Any] | None, parameters: list[Any] | None) -> tuple[Any, list[Any] | None]:
    """Returns a function that builds the optimizer (None if DeepSpeed builds it), and the parameters or groups for it.

    ZeRO needs experts in separate groups, which it creates when it builds the optimizer, from groups with a name.
    """
    if parameters is not None and isinstance(parameters[0], dict):
        parameters = [{"name": f"group-{number}", **group} for number, group in enumerate(parameters)]
    return build and (lambda given: build(configure_moe_param_groups(given))), parameters


def group(size: int) -> dist.ProcessGroup:
    """Returns the ranks that share this rank's experts."""
    return cast(dist.ProcessGroup, groups._get_expert_parallel_group(f"ep_size_{size}"))

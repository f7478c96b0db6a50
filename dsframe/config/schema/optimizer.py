# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""``optimizer``: the update rule and its parameters.

``type`` names an optimizer of DeepSpeed (in any case) or a class of ``torch.optim`` (exact case); it determines what
``params`` may hold. Source: ``DeepSpeedEngine._configure_basic_optimizer`` of DeepSpeed 0.19.8 and torch 2.13.
"""

from collections.abc import Mapping
from typing import Any

from dsframe.config.schema.base import Count, Section, SectionClass
from dsframe.config.schema.parameters import DEEPSPEED_OPTIMIZERS, OWN_OPTIMIZER, TORCH_OPTIMIZERS


def muon_rates(params: Mapping[str, Any]) -> tuple[float, float]:
    """Returns Muon's learning rates: for its matrices, and for the parameters that it updates by Adam.

    Source: deepspeed 0.19.8, ``runtime/engine.py`` (_configure_basic_optimizer), ``zero/muon/original_muon.py``.
    """
    both = params.get("lr")
    muon, adam = (both if params.get(key) is None else params[key] for key in ("muon_lr", "adam_lr"))
    return 0.02 if muon is None else float(muon), 3e-4 if adam is None else float(adam)


SPELLINGS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon")
"""The usual spellings of DEEPSPEED_OPTIMIZERS, in the same order."""

OF_TASK = "task"
"""``optimizer.type`` for an optimizer that the task builds (``Task.optimizer``)."""


class Optimizer(Section):
    """The update rule. Without this section DeepSpeed expects an optimizer from the program; dsframe requires it."""

    type: str
    """Adam, AdamW, Adagrad, Lamb, Lion, Muon; a class of ``torch.optim`` such as SGD; ``module:Class``, your own
    optimizer with torch's interface; or ``task``, the result of ``Task.optimizer``. DeepSpeed takes the last two at
    stage 0, and at stages 1 to 3 with ``zero_allow_untested_optimizer``."""
    params: dict[str, Any] = {}
    """Arguments of the optimizer."""
    legacy_fusion: bool = False
    """Pick the old fused fp16 optimizer wrapper at stage 0."""

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> SectionClass | None:
        name = raw.get("type")
        if key != "params" or not isinstance(name, str):
            return None
        if name.lower() in DEEPSPEED_OPTIMIZERS:
            return DEEPSPEED_OPTIMIZERS[name.lower()]
        return OWN_OPTIMIZER if ":" in name or name == OF_TASK else TORCH_OPTIMIZERS.get(name)


class ModelOptimizer(Optimizer):
    """The optimizer of one of several models."""

    every_steps: Count = 1
    """Steps between two updates of the model: 5 for the generator of a WGAN whose critic is updated in every step."""

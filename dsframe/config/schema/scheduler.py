# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""``scheduler``: how the learning rate changes from step to step.

Source: ``deepspeed/runtime/lr_schedules.py`` of DeepSpeed 0.19.8 and ``torch.optim.lr_scheduler`` of torch 2.13.
"""

from collections.abc import Mapping
from typing import Any

from dsframe.config.schema.base import Section, SectionClass
from dsframe.config.schema.parameters import DEEPSPEED_SCHEDULERS, HF_SCHEDULERS, TORCH_SCHEDULERS


class Scheduler(Section):
    """The learning-rate schedule, advanced once for each optimizer step."""

    type: str
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, a class of ``torch.optim.lr_scheduler``, or with a
    ``dsframe`` section a name of Hugging Face's Trainer (``linear``, ``cosine``, ...)."""
    params: dict[str, Any] = {}
    """Arguments of the schedule. DeepSpeed raises if the key is absent; write ``{}`` if nothing is required."""

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> SectionClass | None:
        name = raw.get("type")
        if key != "params" or not isinstance(name, str):
            return None
        return DEEPSPEED_SCHEDULERS.get(name) or TORCH_SCHEDULERS.get(name) or HF_SCHEDULERS.get(name)

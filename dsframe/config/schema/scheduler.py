# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""``scheduler``: how the learning rate changes from step to step.

Source: ``deepspeed/runtime/lr_schedules.py`` of DeepSpeed 0.19.8 and ``torch.optim.lr_scheduler`` of torch 2.13.
"""

from collections.abc import Mapping
from typing import Any

from dsframe.config.schema.base import Classes, Section, SectionClass

DEEPSPEED_SCHEDULERS: Mapping[str, SectionClass] = Classes(
    {
        "LRRangeTest": "deepspeed_scheduler:LrRangeTestParams",
        "OneCycle": "deepspeed_scheduler:OneCycleParams",
        "WarmupLR": "deepspeed_scheduler:WarmupLrParams",
        "WarmupDecayLR": "deepspeed_scheduler:WarmupDecayLrParams",
        "WarmupCosineLR": "deepspeed_scheduler:WarmupCosineLrParams",
    }
)
TORCH_SCHEDULERS: Mapping[str, SectionClass] = Classes(
    {
        "StepLR": "torch_scheduler:StepLrParams",
        "MultiStepLR": "torch_scheduler:MultiStepLrParams",
        "ConstantLR": "torch_scheduler:ConstantLrParams",
        "LinearLR": "torch_scheduler:LinearLrParams",
        "ExponentialLR": "torch_scheduler:ExponentialLrParams",
        "PolynomialLR": "torch_scheduler:PolynomialLrParams",
        "CosineAnnealingLR": "torch_scheduler:CosineAnnealingLrParams",
        "CosineAnnealingWarmRestarts": "torch_scheduler:CosineAnnealingWarmRestartsParams",
        "CyclicLR": "torch_scheduler:CyclicLrParams",
        "OneCycleLR": "torch_scheduler:OneCycleLrParams",
        "LambdaLR": "torch_scheduler:LambdaLrParams",
        "MultiplicativeLR": "torch_scheduler:LambdaLrParams",
        "ChainedScheduler": "torch_scheduler:ChainedSchedulerParams",
        "SequentialLR": "torch_scheduler:SequentialLrParams",
    }
)
HF_SCHEDULERS: Mapping[str, SectionClass] = Classes(
    {
        "linear": "hf_scheduler:HfLinearParams",
        "cosine": "hf_scheduler:HfCosineParams",
        "cosine_with_restarts": "hf_scheduler:HfCosineWithRestartsParams",
        "cosine_with_min_lr": "hf_scheduler:HfCosineWithMinLrParams",
        "polynomial": "hf_scheduler:HfPolynomialParams",
        "constant": "hf_scheduler:HfConstantParams",
        "constant_with_warmup": "hf_scheduler:HfConstantWithWarmupParams",
        "warmup_stable_decay": "hf_scheduler:HfWarmupStableDecayParams",
        "nanogpt": "hf_scheduler:NanoGptParams",
        "ReduceLROnPlateau": "hf_scheduler:PlateauParams",
    }
)
"""Names that dsframe knows and DeepSpeed does not: for files with a "dsframe" section."""
SCHEDULERS_WITHOUT_ROUTE: Mapping[str, str] = {
    "cosine": 'it is a name of Hugging Face: write "WarmupCosineLR"',
    "linear": 'it is a name of Hugging Face: write "WarmupDecayLR"',
    "constant": "it is a name of Hugging Face: leave the scheduler out",
    "constant_with_warmup": 'it is a name of Hugging Face: write "WarmupLR"',
    "ReduceLROnPlateau": "it needs a metric at each step, which no engine gives it",
}


class Scheduler(Section):
    """The learning-rate schedule, advanced once for each optimizer step."""

    type: str
    """LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, a class of ``torch.optim.lr_scheduler``, or with a
    ``dsframe`` section a name of Hugging Face's Trainer (``linear``, ``cosine``, ...) or ``nanogpt``."""
    params: dict[str, Any] = {}
    """Arguments of the schedule. DeepSpeed raises when the key is absent; ``{}`` will do where nothing is required."""

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> SectionClass | None:
        name = raw.get("type")
        if key != "params" or not isinstance(name, str):
            return None
        return DEEPSPEED_SCHEDULERS.get(name) or TORCH_SCHEDULERS.get(name) or HF_SCHEDULERS.get(name)

"""Number formats: ``fp16``, ``bf16``, ``torch_autocast`` and ``data_types``.

Source: ``deepspeed/runtime/precision_config.py`` and ``runtime/config.py`` of DeepSpeed 0.19.8.
"""

from typing import Literal

from dsframe.config.schema.base import Coerced, NonNegative, Section
from dsframe.config.schema.parameters import passed

FloatDtype = Literal[
    "torch.float16", "fp16", "float16", "half", "torch.bfloat16", "bf16", "bfloat16",
    "torch.float32", "fp32", "float32", "float",
]  # fmt: skip
"""Spellings of the types that torch can cast to."""


class Fp16(Coerced):
    """Parameters and gradients in float16 with loss scaling; the optimizer keeps fp32 weights."""

    enabled: bool = False
    """Turns it on. The device must support fp16; many CPUs do not."""
    auto_cast: bool = False
    """Cast floating-point inputs of the model to fp16."""
    loss_scale: NonNegative = 0.0
    """Fixed scale; 0 is dynamic scaling."""
    initial_scale_power: int = 16
    """Dynamic scaling starts at 2 to this power."""
    loss_scale_window: int = 1000
    """Steps without overflow before the scale doubles. Must be above 0 with dynamic scaling."""
    hysteresis: int = 2
    """Overflows in a row before the scale is halved."""
    consecutive_hysteresis: bool = False
    """Reset the count of overflows after each step without one."""
    min_loss_scale: int = 1
    """Smallest scale. Must be above 0 with dynamic scaling."""
    fp16_master_weights_and_grads: bool = False
    """Keep the optimizer's weights and gradients in fp16 too. No engine accepts it."""


@passed
class Bf16(Coerced):
    """Parameters and gradients in bfloat16; the optimizer keeps fp32 weights. No loss scaling."""

    enabled: bool = False
    """Turns it on."""


class TorchAutocast(Section):
    """``torch.autocast`` around forward: parameters stay fp32, chosen operations run in 16 bits."""

    enabled: bool = False
    """Turns it on."""
    dtype: FloatDtype | None = None
    """Lower precision, such as ``bfloat16``. Default: torch's default for the device."""
    lower_precision_safe_modules: list[str] | None = None
    """Module classes whose gradients may be communicated in the lower precision."""


@passed
class DataTypes(Section):
    """Number formats of single parts."""


CommunicationType = Literal["fp16", "bf16", "fp32"]

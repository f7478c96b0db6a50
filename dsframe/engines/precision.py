"""Number formats of the model's computation and of the optimizer's weights.

DeepSpeed's ``bf16`` and ``fp16`` sections mean: parameters have 16 bits, the optimizer has fp32 master weights
(Micikevicius et al. 2018, arXiv 1710.03740). ``torch_autocast`` means: parameters stay fp32, matrix products run in 16
bits. Losses and metrics are always computed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dsframe.errors import ConfigError, Problem
from dsframe.model import output_classes
from dsframe.model.formats import parameter_dtype as parameter_dtype

if TYPE_CHECKING:
    from dsframe.config.value import Config

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """Returns the dtype of ``torch_autocast`` (by default torch's for the device); None if it is off.

    Raises ConfigError for a dtype that torch cannot cast to.
    """
    section = config.deepspeed.torch_autocast
    if not section.enabled:
        return None
    if section.dtype is None:
        return torch.get_autocast_dtype(device.type)
    name = section.dtype.removeprefix("torch.")
    dtype = _DTYPES.get(_SHORT.get(name, name))
    if dtype is None:
        message = f"torch cannot cast to {name}"
        raise ConfigError([Problem("error", "torch_autocast.dtype", message, 'write "bfloat16"', code="value")])
    return dtype


def autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Returns torch's autocast context as the file asks for it, or a null context."""
    dtype = autocast_dtype(config, device)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def is_short(dtype: torch.dtype) -> bool:
    """True for 16-bit formats, which need master weights."""
    return dtype in (torch.bfloat16, torch.float16)


def cast_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """Casts floating-point tensors, in any nesting and in objects too, to a 16-bit ``dtype``; leaves everything else
    unchanged."""
    if not is_short(dtype):
        return inputs
    output_classes.register(inputs)
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)


def cast_outputs(outputs: Any) -> Any:
    """Casts the model's 16-bit outputs to float32, so that every engine computes the loss with the same precision.

    Leaves of the graph, which the model created to take derivatives by, are not cast.
    """

    def cast(tensor: Tensor) -> Tensor:
        variable = tensor.requires_grad and tensor.is_leaf
        return tensor.float() if is_short(tensor.dtype) and not variable else tensor

    return tree_map_only(Tensor, cast, outputs)


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Returns the global L2 norm, 0-d on the device: bitwise ``torch.nn.utils.get_total_norm``, in three calls."""
    if not gradients:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def clip(
    gradients: list[Tensor],
    max_norm: float,
    scale: float = 1.0,
    norm_of: Callable[[list[Tensor]], Tensor] = total_norm,
    *,
    always: bool = False,
) -> Tensor | None:
    """Divides ``gradients`` by ``scale`` and clips their global L2 norm to ``max_norm`` (0: no clipping), in place.

    Returns the norm before clipping (0-d, on the device), or None without clipping unless ``always``. The clipping
    factor is ``max_norm / (norm + 1e-6)`` if below 1, as in DeepSpeed and torch. ``norm_of``: the norm over all ranks
    if ``gradients`` are one rank's shards; then collective.
    """
    if scale != 1.0:
        torch._foreach_mul_(gradients, 1.0 / scale)
    if max_norm <= 0 and not always:
        return None
    norm = norm_of(gradients)
    if max_norm > 0:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # On a CPU reading the factor costs nothing, and multiplying all gradients by 1 takes as long as Adam.
        if factor.device.type != "cpu" or factor != 1.0:
            torch._foreach_mul_(gradients, factor)
    return norm


def scales_losses(config: Config, device: torch.device) -> bool:
    """True if losses are scaled because gradients are fp16; then some steps overflow and are skipped."""
    return config.deepspeed.fp16.enabled or autocast_dtype(config, device) == torch.float16


def finite(norm: Tensor | None) -> bool:
    """True if the norm, and so every gradient, is finite. Waits for the device."""
    return norm is None or math.isfinite(float(norm))


def gradients_of(parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients that are not None."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]

"""Number formats: what the model computes in, and what the optimizer updates.

DeepSpeed's ``bf16`` and ``fp16`` sections mean: the model's parameters are 16 bits wide, the optimizer owns fp32 masters
(Micikevicius et al. 2018, arXiv 1710.03740). ``torch_autocast`` means: parameters stay fp32, matrix products run in 16 bits.
Losses and metrics are computed in fp32 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dsframe.errors import ConfigError, Problem
from dsframe.model import output_classes
from dsframe.model.formats import parameter_dtype as parameter_dtype
from dsframe.values import trainable

if TYPE_CHECKING:
    from dsframe.config.value import Config

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """The dtype of ``torch_autocast``, torch's own for the device where the file names none; None where it is off.

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
    """torch's autocast as the file asks for it, or nothing."""
    dtype = autocast_dtype(config, device)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def is_short(dtype: torch.dtype) -> bool:
    """Returns whether it is a format of 16 bits, which needs masters."""
    return dtype in (torch.bfloat16, torch.float16)


def cast_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of any nesting, in objects too, in a ``dtype`` of 16 bits, which the file asks for; everything else
    as it is."""
    if not is_short(dtype):
        return inputs
    output_classes.register(inputs)
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)


def cast_outputs(outputs: Any) -> Any:
    """The model's outputs of 16 bits in float32, so that every engine computes the loss with the same precision.

    What the model has made to take derivatives by, a leaf of the graph, stays.
    """

    def cast(tensor: Tensor) -> Tensor:
        variable = tensor.requires_grad and tensor.is_leaf
        return tensor.float() if is_short(tensor.dtype) and not variable else tensor

    return tree_map_only(Tensor, cast, outputs)


class MasterWeights:
    """fp32 copies of 16-bit parameters, for an optimizer of full replicas."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: its trainable parameters are 16 bits wide."""
        self.parameters = trainable(model)
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.parameters]
        self._windows = list(_windows([parameter.numel() for parameter in self.parameters]))

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Moves the model's gradients into the masters', in fp32, and clears the model's.

        One call converts the gradients of a window; then those of 16 bits are let go of, before the next window begins.
        """
        for window in self._windows:
            pairs = list(zip(self.parameters[window], self.masters[window], strict=True))
            short = gradients_of([parameter for parameter, _ in pairs])
            full = [torch.empty_like(gradient, dtype=torch.float32) for gradient in short]
            if full:
                torch._foreach_copy_(full, short)
            del short
            converted = iter(full)
            for parameter, master in pairs:
                master.grad = None if parameter.grad is None else next(converted)
                parameter.grad = None

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copies the model's weights into the masters."""
        torch._foreach_copy_(list[Tensor](self.masters), list[Tensor](self.parameters))

    @torch.no_grad()
    def give_weights(self) -> None:
        """Rounds the masters into the model."""
        torch._foreach_copy_(list[Tensor](self.parameters), list[Tensor](self.masters))


def _windows(sizes: Sequence[int]) -> Iterator[slice]:
    """Returns consecutive parts of ``sizes`` of at most 2^24 elements together (32 MiB in 16 bits), or one larger one."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > 1 << 24:
            yield slice(first, index)
            first, total = index, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def total_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm of all ``gradients`` together, 0-d on their device: ``torch.nn.utils.get_total_norm`` bit for bit, in three calls."""
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

    Returns the norm before clipping (0-d, on the device), or None where nothing asked for it (``always`` does). The factor is
    ``max_norm / (norm + 1e-6)`` where that is below 1: DeepSpeed's and torch's agree. ``norm_of``: the norm of what ranks
    hold together, where ``gradients`` are one rank's shards; collective then.
    """
    if scale != 1.0:
        torch._foreach_mul_(gradients, 1.0 / scale)
    if max_norm <= 0 and scale == 1.0 and not always:
        return None
    norm = norm_of(gradients)
    if max_norm > 0:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # On a CPU a number is there when it is asked for, and a pass over all gradients to multiply by 1 takes as long as Adam's.
        if factor.device.type != "cpu" or factor != 1.0:
            torch._foreach_mul_(gradients, factor)
    return norm


def scales_losses(config: Config, device: torch.device) -> bool:
    """True if losses are scaled because gradients are fp16: then some steps overflow, and are left out, as a matter of course."""
    return config.deepspeed.fp16.enabled or autocast_dtype(config, device) == torch.float16


def finite(norm: Tensor | None) -> bool:
    """True if the norm, and so every gradient, is finite. Waits for the device."""
    return norm is None or math.isfinite(float(norm))


def gradients_of(parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> list[Tensor]:
    """The gradients that are there."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]

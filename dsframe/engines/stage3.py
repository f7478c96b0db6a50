"""What makes a step of ZeRO-3 slow beside its arithmetic, and what dsframe does instead.

DeepSpeed 0.19.8 takes a fifth longer than DDP for a GPT of 4.8 million parameters on two CPU ranks. Measured there: after each
update every parameter that is kept is gathered by a collective of its own (59 in a step); linear layers add their bias in a
second pass; gradients are copied into a bucket and from there into the flat tensor that is sent; and about a thousand calls a
step open and close NVTX ranges that only an NVIDIA GPU's profiler would see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsframe.config.schema.zero import PERSISTENCE, SMALL
from dsframe.engines.library import LinearFunctionForZeroStage3, nvtx, partition_parameters

_linear = torch._C._nn.linear


class Linear(LinearFunctionForZeroStage3):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's linear layer, which keeps no view of a weight that is to be released, with torch's own forward pass."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # DeepSpeed's name
        """``input`` times ``weight`` transposed, plus ``bias``, in one kernel."""
        output: Tensor = _linear(input, weight, bias)
        return output


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # torch's name
    """What DeepSpeed puts in the place of ``torch.nn.functional.linear``."""
    return Linear.apply(input, weight, bias)


def prepare() -> None:
    """Before DeepSpeed's engine is made."""
    partition_parameters.zero3_linear_wrap = linear
    nvtx.enable_nvtx = torch.cuda.is_available()


def copy_once(section: dict[str, Any]) -> None:
    """Says in the ``zero_optimization`` section for DeepSpeed that gradients stay where they are until they are sent, which copies
    them anyway (but for one that is alone). The bucket is against holes in a GPU's memory; what is sent, and when, is the same.

    Source: deepspeed 0.19.8, ``runtime/zero/stage3.py`` (__add_grad_to_ipg_bucket, __avg_scatter_grads).
    """
    if section.get("reduce_scatter", True):  # without it the bucket itself is sent
        section["contiguous_gradients"] = False


def keep_whole(section: dict[str, Any]) -> None:
    """Says in the ``zero_optimization`` section for DeepSpeed that all parameters stay (``Zero.keeps_whole``)."""
    section.update(dict.fromkeys(PERSISTENCE, SMALL))


def gather_at_once(engine: Any) -> None:
    """What is kept is gathered by one collective after each update, instead of one for each parameter.

    Source: deepspeed 0.19.8, ``runtime/zero/stage3.py`` (_post_step), ``partition_parameters.py`` (_allgather_params_coalesced).
    """
    kept = getattr(engine.optimizer, "persistent_parameters", None)
    if not kept:
        return
    first = kept[0]
    one_by_one = first.all_gather

    def gather(param_list: Any = None, *more: Any, **options: Any) -> Any:  # named as DeepSpeed's callers name it
        if param_list is not kept or more or options:
            return one_by_one(param_list, *more, **options)
        absent = [one for one in kept if one.ds_status is partition_parameters.ZeroParamStatus.NOT_AVAILABLE]
        if any(_elsewhere(one) for one in absent):
            return one_by_one(kept)
        if absent:
            first.all_gather_coalesced(absent).wait()
        return None

    first.all_gather = gather


def forget_evaluation(engine: Any) -> None:
    """An evaluation before the first training step leaves no trace with DeepSpeed, which would take it for a training step's.

    It decides from the order of modules, once and for good, what it gathers again in the backward pass: from a forward pass alone
    it would release everything after it, and send half as much again in every step (seen in its count of bytes). Source:
    deepspeed 0.19.8, ``runtime/zero/partitioned_param_coordinator.py`` (reset_step, __params_to_release).
    """
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    if coordinator.is_record_trace():
        coordinator._invalidate_trace()


def _elsewhere(parameter: Any) -> bool:
    """Whether the two ways of gathering read different things: a secondary copy (hpZ), which at this moment is that of before the
    update and which ``all_gather_coalesced`` alone takes; or a quantized share, which it looks for in its own way."""
    return parameter.ds_secondary_tensor is not None or hasattr(parameter.ds_tensor, "ds_quant_scale")

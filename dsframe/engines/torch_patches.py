"""Every place where dsframe changes what torch does, or goes past its public interface, each with its reason.

``PATCHES`` lists them; ``tests/unit/test_torch_patches.py`` shows each fault and fails with "no longer needed" once it is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dsframe.values import trainable

PATCHES = {
    "settle_buckets": "DDP arranges its buckets anew after the first backward pass: a restarted run would round otherwise",
    "skip_sparse_buffers": "DDP sends the model's buffers at the start, and fails at a sparse one, and at rare dtypes",
    "by_another_name": "DDP refuses torch's own bf16 hook without NCCL, by its name; Gloo adds bf16 up as well",
    "put_linear_back": "DeepSpeed's ZeRO-3 replaces torch.nn.functional.linear, for all that follows in the process",
}
"""Name -> what goes wrong without it, with torch 2.13."""


def skip_sparse_buffers(model: nn.Module) -> None:
    """Each rank's buffers that no library sends are as its ``model()`` makes them: sparse ones, and rare dtypes."""
    sparse = [name for name, buffer in model.named_buffers() if not can_be_sent(buffer)]
    if sparse:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sparse)  # type: ignore[no-untyped-call]


def can_be_sent(buffer: torch.Tensor) -> bool:
    """True for a dense tensor of a dtype that libraries send."""
    return buffer.layout == torch.strided and buffer.dtype in _SENT


_SENT = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
}  # fmt: skip


def by_another_name(hook: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """``hook`` for ``register_comm_hook``, which knows what it refuses by name."""
    return lambda _, bucket: hook(None, bucket)


_LINEAR = nn.functional.linear


def put_linear_back() -> None:
    """Undoes what ``deepspeed.zero.Init`` has done with ``memory_efficient_linear`` (0.19.8, ``partition_parameters.py``)."""
    if str(nn.functional.linear.__module__).startswith("deepspeed."):
        nn.functional.linear = _LINEAR


class _EveryParameter(nn.Module):
    """Nothing but the trainable parameters of a model, whose gradients come in the reverse of their order, and are zero."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, zero: Tensor) -> Tensor:
        trained = trainable(self.model)
        return torch.stack([parameter.sum() * zero for parameter in trained]).sum()


def settle_buckets(wrapped: DistributedDataParallel, device: torch.device) -> None:
    """**Collective.** A backward pass of zeros, so that DDP's buckets are the same in every step of every run.

    DDP begins with buckets in the order of the parameters, and after its first backward pass arranges them once and for all in the
    order in which gradients came (torch 2.13, ``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets``). Where in a bucket
    a number lies decides in which order the ranks' summands are added, from three ranks on: so the first step after a restart
    would round otherwise than the same step of the run that was not interrupted. Here they come in the reverse of the order in
    which the model has its parameters, as in ``dsframe.engines.buckets``: buckets leave one after the other, so a layer that
    comes late in that order but early in the forward pass holds them up.
    """
    model = wrapped.module
    wrapped.module = _EveryParameter(model)
    try:
        wrapped(torch.zeros((), device=device)).backward()  # on GPUs DDP takes no call without an input
    finally:
        wrapped.module = model
    wrapped.zero_grad(set_to_none=True)

"""All patches of torch and uses of its private interface, each with its reason.

``PATCHES`` lists them; ``tests/unit/test_torch_patches.py`` shows each fault and says "no longer needed" when it is
fixed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dsframe.values import trainable

PATCHES = {
    "settle_buckets": "DDP rebuilds its buckets after the first backward pass: a restarted run would round differently",
    "skip_sparse_buffers": "DDP sends the model's buffers at the start, and fails at a sparse one, and at rare dtypes",
    "by_another_name": "DDP refuses torch's own bf16 hook without NCCL, by its name; Gloo adds bf16 up as well",
    "allow_views": "FSDP warns of outputs that are views; those of other outputs keep their hooks, and dsframe copies the rest",
    "put_linear_back": "DeepSpeed's ZeRO-3 replaces torch.nn.functional.linear, for all that follows in the process",
}
"""Name -> what goes wrong without it, with torch 2.13."""


def allow_views() -> None:
    """Leaves out FSDP's warning of outputs that are views, for the rest of the process."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)


def skip_sparse_buffers(model: nn.Module) -> None:
    """Excludes sparse buffers and rare dtypes, which cannot be sent, from DDP's broadcast: each rank makes its own."""
    sparse = [name for name, buffer in model.named_buffers() if not can_be_sent(buffer)]
    if sparse:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sparse)  # type: ignore[no-untyped-call]


def can_be_sent(buffer: torch.Tensor) -> bool:
    """True for a dense tensor of a dtype that libraries can send."""
    return buffer.layout == torch.strided and buffer.dtype in _SENT


_SENT = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
}  # fmt: skip


def by_another_name(hook: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Returns ``hook`` under another name for ``register_comm_hook``, which refuses hooks by name."""
    return lambda _, bucket: hook(None, bucket)


_LINEAR = nn.functional.linear


def put_linear_back() -> None:
    """Undoes ``deepspeed.zero.Init``'s ``memory_efficient_linear`` (0.19.8, ``partition_parameters.py``)."""
    if str(nn.functional.linear.__module__).startswith("deepspeed."):
        nn.functional.linear = _LINEAR


class _EveryParameter(nn.Module):
    """A model's trainable parameters only. Their gradients are zero and arrive in the reverse of their order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, zero: Tensor) -> Tensor:
        trained = trainable(self.model)
        return torch.stack([parameter.sum() * zero for parameter in trained]).sum()


def settle_buckets(wrapped: DistributedDataParallel, device: torch.device) -> None:
    """**Collective.** Runs a backward pass of zeros, so that DDP's buckets are the same in every step of every run.

    DDP starts with buckets in the order of the parameters. After its first backward pass it rearranges them once, in
    the order in which gradients arrived (torch 2.13, ``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets``).
    The position of a number in a bucket decides in which order the ranks' values are added, from three ranks on. So the
    first step after a restart would round differently than the same step of the uninterrupted run. Here gradients
    arrive in the reverse order of the model's parameters, as in ``dsframe.engines.buckets``. Buckets are sent one after
    the other, so a layer that is late in that order but early in the forward pass delays them.
    """
    model = wrapped.module
    wrapped.module = _EveryParameter(model)
    try:
        wrapped(torch.zeros((), device=device)).backward()  # on GPUs DDP requires an input
    finally:
        wrapped.module = model
    wrapped.zero_grad(set_to_none=True)

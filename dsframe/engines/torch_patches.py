"""Every place where dsframe changes what torch does, or goes past its public interface, each with its reason.

``PATCHES`` lists them; ``tests/unit/test_torch_patches.py`` shows each fault and fails with "no longer needed" once it is gone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch._compile
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PATCHES = {
    "settle_buckets": "DDP arranges its buckets anew after the first backward pass: a restarted run would round otherwise",
    "keep_buffers": "DDP sends rank 0's buffers at every forward pass; told not to, it does not send them at the start either",
    "skip_sparse_buffers": "DDP sends the model's buffers at the start, and fails at a sparse one",
    "by_another_name": "DDP refuses torch's own bf16 hook without NCCL, by its name; Gloo adds bf16 up as well",
    "without_compiler": "the first optimizer imports torch.compile's front end, 1.4 s and 71 MiB of each process, to do nothing",
}
"""Name -> what goes wrong without it, with torch 2.13."""


def _compiler() -> Any:
    """torch._dynamo, where it is imported to the end; None where it is not, so that nothing can be compiling."""
    found = sys.modules.get("torch._dynamo")
    return found if hasattr(found, "disable") and hasattr(found, "graph_break") else None


def without_compiler() -> None:
    """Optimizers, DDP and recomputed blocks work without torch._dynamo until something imports it, and with it from then on.

    torch keeps their functions out of what is compiled, and imports the compiler to do so (torch 2.13, ``_compile.py``,
    ``_disable_dynamo``; ``optim/optimizer.py``, ``_use_grad_for_differentiable``). While it is not imported nothing is compiled.
    """
    for owner in (torch.optim.Optimizer, DistributedDataParallel, torch.utils.checkpoint):
        for kept in list(vars(owner).values()):
            while hasattr(kept, "__wrapped__"):  # one is a context manager as well
                _without(kept)
                kept = kept.__wrapped__
    for kind in list(vars(torch.optim).values()):
        step = vars(kind).get("step") if isinstance(kind, type) else None
        if getattr(getattr(step, "__code__", None), "co_name", "") == "_use_grad":
            kind.step = _step_without(step)


@contextmanager
def constructed_without_compiler() -> Iterator[None]:
    """Inside it DDP's constructor, which asks the compiler whether DDP shall reduce gradients, hears the default: yes."""
    if _compiler() is not None:
        yield
        return
    mode = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in = torch.__dict__["_dynamo"] = SimpleNamespace(utils=mode)
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is stand_in:  # an import inside would have put the module there
            del torch.__dict__["_dynamo"]


def _without(kept: Any) -> None:
    """Has a function that ``torch._disable_dynamo`` has wrapped do its work as it is until there is a compiler."""
    code = getattr(kept, "__code__", None)
    if code is None or code.co_filename != torch._compile.__file__ or "__dynamo_disable" in vars(kept.__wrapped__):
        return
    function = kept.__wrapped__
    recursive = dict(zip(code.co_freevars, kept.__closure__, strict=True))["recursive"].cell_contents

    def call(*arguments: Any, **named: Any) -> Any:
        compiler = _compiler()
        if compiler is None:
            return function(*arguments, **named)
        function.__dynamo_disable = compiler.disable(function, recursive, wrapping=False)
        return function.__dynamo_disable(*arguments, **named)

    function.__dynamo_disable = call


def _step_without(step: Any) -> Any:
    inner = step.__wrapped__

    @functools.wraps(inner)
    def call(self: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        if _compiler() is not None:
            return step(self, *arguments, **named)
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            return inner(self, *arguments, **named)
        finally:
            torch.set_grad_enabled(before)

    return call


def keep_buffers(wrapped: DistributedDataParallel) -> None:
    """Each rank's buffers are its own from now on, as on every other engine; an evaluation sends rank 0's.

    torch 2.13 has an argument for it (``forward_sync_buffers``); 2.6, the oldest that dsframe takes, has none.
    """
    wrapped.broadcast_buffers = False


def skip_sparse_buffers(model: nn.Module) -> None:
    """Each rank's sparse buffers are as its ``model()`` makes them: no library sends them, and checkpoints have none."""
    sparse = [name for name, buffer in model.named_buffers() if buffer.layout != torch.strided]
    if sparse:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sparse)  # type: ignore[no-untyped-call]


def by_another_name(hook: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """``hook`` for ``register_comm_hook``, which knows what it refuses by name."""
    return lambda _, bucket: hook(None, bucket)


class _EveryParameter(nn.Module):
    """Nothing but the trainable parameters of a model, whose gradients come in the reverse of their order, and are zero."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, zero: Tensor) -> Tensor:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
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

"""Each patch of torch: the fault is there without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel, distributed

from dsframe.engines import torch_patches

NOT_NEEDED = "no longer needed: torch does right by itself"


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_settle_buckets() -> None:
    def rebuilt_by_a_step(*, patched: bool) -> tuple[bool, bool]:
        wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        if patched:
            torch_patches.settle_buckets(wrapped, torch.device("cpu"))
        first = bool(wrapped.reducer._rebuild_buckets())
        wrapped(torch.ones(1, 2)).sum().backward()
        return first, bool(wrapped.reducer._rebuild_buckets())

    assert rebuilt_by_a_step(patched=False) == (False, True), NOT_NEEDED
    assert rebuilt_by_a_step(patched=True) == (True, False)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning")
def test_keep_buffers() -> None:
    with mock.patch.object(distributed, "_sync_module_states") as sent:
        DistributedDataParallel(nn.BatchNorm1d(2), broadcast_buffers=False)
        assert sent.call_args.kwargs["broadcast_buffers"] is False, NOT_NEEDED
        wrapped = DistributedDataParallel(nn.BatchNorm1d(2))
        assert sent.call_args.kwargs["broadcast_buffers"] is True
    assert wrapped.will_sync_module_buffers()
    torch_patches.keep_buffers(wrapped)
    assert not wrapped.will_sync_module_buffers()


@pytest.mark.usefixtures("alone")
def test_by_another_name() -> None:
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="BF16 all reduce communication hook"):
        wrapped.register_comm_hook(None, bf16_compress_hook)
    wrapped.register_comm_hook(None, torch_patches.by_another_name(bf16_compress_hook))
    wrapped(torch.ones(1, 2)).sum().backward()


@pytest.mark.usefixtures("alone")
def test_skip_sparse_buffers() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(2).to_sparse())
    with pytest.raises(RuntimeError, match="No support for sparse tensors"):
        DistributedDataParallel(model)
    torch_patches.skip_sparse_buffers(model)
    DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()


def test_each_patch_has_its_test() -> None:
    assert {name for name in torch_patches.PATCHES if f"test_{name}" in globals()} == set(torch_patches.PATCHES)
    assert all(hasattr(torch_patches, name) for name in torch_patches.PATCHES)


OPTIMIZERS = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dsframe.engines import torch_patches
if sys.argv[1] == "patched":
    torch_patches.without_compiler()
    torch_patches.without_compiler()
weights = torch.nn.Linear(2, 2, bias=False)
torch.nn.init.ones_(weights.weight)
def step(kind):
    optimizer = kind(weights.parameters(), lr=0.1)
    weights(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
    step(kind)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with torch_patches.constructed_without_compiler():
    wrapped = DistributedDataParallel(weights)
wrapped(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
print("torch._dynamo" in sys.modules, [round(float(one), 4) for one in weights.weight.flatten()])
import torch._dynamo
step(torch.optim.AdamW)
kept = torch.optim.Optimizer.add_param_group.__wrapped__.__dynamo_disable
print(kept.__module__.startswith("torch._dynamo"), [round(float(one), 4) for one in weights.weight.flatten()])
"""


def test_without_compiler() -> None:
    """As many updates, to the same weights; and once the compiler is imported, torch's own way to keep it out of optimizers."""
    plain, patched = (
        subprocess.run(
            [sys.executable, "-c", OPTIMIZERS, how], capture_output=True, text=True, timeout=120, check=True
        ).stdout.splitlines()
        for how in ("plain", "patched")
    )
    assert plain[0].startswith("True "), NOT_NEEDED
    assert patched[0] == plain[0].replace("True", "False", 1)
    assert patched[1] == plain[1]
    assert patched[1].startswith("True ")

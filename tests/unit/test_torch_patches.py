"""Each patch of torch: the fault is there without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

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

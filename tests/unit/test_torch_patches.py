"""Each patch of torch: the fault is there without it."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dsframe.engines import torch_patches
from tests.processes import run_ranks, warm

NOT_NEEDED = "no longer needed: torch does right by itself"


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_settle_buckets():
    def rebuilt_by_a_step(*, patched):
        wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        if patched:
            torch_patches.settle_buckets(wrapped, torch.device("cpu"))
        first = bool(wrapped.reducer._rebuild_buckets())
        wrapped(torch.ones(1, 2)).sum().backward()
        return first, bool(wrapped.reducer._rebuild_buckets())

    assert rebuilt_by_a_step(patched=False) == (False, True), NOT_NEEDED
    assert rebuilt_by_a_step(patched=True) == (True, False)


@pytest.mark.usefixtures("alone")
def test_by_another_name():
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="BF16 all reduce communication hook"):
        wrapped.register_comm_hook(None, bf16_compress_hook)
    wrapped.register_comm_hook(None, torch_patches.by_another_name(bf16_compress_hook))
    wrapped(torch.ones(1, 2)).sum().backward()


@pytest.mark.usefixtures("alone")
def test_skip_sparse_buffers():
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(2).to_sparse())
    with pytest.raises(RuntimeError, match="No support for sparse tensors"):
        DistributedDataParallel(model)
    torch_patches.skip_sparse_buffers(model)
    DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()


class _Half(nn.Linear):
    def forward(self, inputs):
        whole = super().forward(inputs)
        return whole, whole[:, :1]


@pytest.mark.usefixtures("alone")
def test_allow_views():
    module = _Half(2, 2)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    with pytest.warns(UserWarning, match="returned a view tensor"):
        module(torch.ones(1, 2))
    with warnings.catch_warnings(record=True) as said:
        torch_patches.allow_views()
        module(torch.ones(1, 2))
    assert not said


def test_put_linear_back(tmp_path):
    """In a process of its own, which goes on with torch after a training at ZeRO-3."""
    pytest.importorskip("deepspeed")
    program = """
import torch, dsframe
from dsframe.engines import torch_patches
from dsframe.engines.deepspeed import engine
from torch.nn import functional
class Line(dsframe.Task):
    def model(self): return torch.nn.Linear(2, 1)
    def loss(self, outputs, targets): return (outputs - targets).square().mean()
    def train_data(self): return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
file = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3}}
theirs, put_back = functional.linear, torch_patches.put_linear_back
torch_patches.put_linear_back = lambda: None
dsframe.fit(Line(), file | {"dsframe": {"engine": "deepspeed", "steps": 1, "run_dir": "first"}})
print(functional.linear is theirs)
torch_patches.put_linear_back = put_back
dsframe.fit(Line(), file | {"dsframe": {"engine": "deepspeed", "steps": 1, "run_dir": "second"}})
print(functional.linear is theirs)
"""
    (tmp_path / "program.py").write_text(program)
    finished = run_ranks(warm(1, ["program.py"]), cwd=tmp_path, timeout_seconds=120).check()
    assert [line for line in finished.stdout.splitlines() if line in ("True", "False")] == ["False", "True"], NOT_NEEDED


def test_each_patch_has_its_test():
    assert {name for name in torch_patches.PATCHES if f"test_{name}" in globals()} == set(torch_patches.PATCHES)
    assert all(hasattr(torch_patches, name) for name in torch_patches.PATCHES)

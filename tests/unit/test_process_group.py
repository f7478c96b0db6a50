"""What torch.distributed is opened with, and what libraries find in the environment then."""

import os
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dsframe
from dsframe.cluster import process_group
from dsframe.cluster.world import World
from dsframe.errors import WorldError
from dsframe.guard import watchdog
from dsframe.model.plan import collective_limit
from tests.files import ds_config

SECOND_GPU, ONLY_GPU, CPU = torch.device("cuda", 1), torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def opened(monkeypatch):
    """What torch is told."""
    told = []
    monkeypatch.setattr(process_group, "meet", lambda *_: None)
    monkeypatch.setattr(process_group, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(process_group, "rendezvous_address", lambda _: ("127.0.0.1", 1))
    monkeypatch.setattr(process_group, "explained", lambda *_: nullcontext())
    monkeypatch.setattr(
        process_group.dist, "init_process_group", lambda backend, **more: told.append({"backend": backend, **more})
    )
    with mock.patch.dict(os.environ):
        yield told


@pytest.mark.parametrize(
    ("world", "device", "number"),
    [
        (World(1, 2, 1, 2), SECOND_GPU, "1"),
        (World(1, 2, 1, 2, launcher="srun"), ONLY_GPU, "0"),
        (World(1, 2, 1, 2), CPU, "1"),
    ],
)
def test_libraries_take_the_local_rank_for_the_number_of_the_gpu(world, device, number, opened):
    os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = "1"
    process_group.open_process_group(world, device)
    assert os.environ["LOCAL_RANK"] == number
    assert os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == number, "DeepSpeed asserts that they are equal"


def test_open_mpis_variable_is_not_made_up(opened):
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)
    process_group.open_process_group(World(), CPU)
    assert "OMPI_COMM_WORLD_LOCAL_RANK" not in os.environ


def test_engines_that_share_a_group_join_the_first():
    with process_group.shared():
        assert [process_group.joins() for _ in range(3)] == [False, True, True]
    assert not process_group.joins()


def test_one_process_binds_no_device(opened):
    """NCCL's start has failed with it (DeepSpeed's issue 8248)."""
    process_group.open_process_group(World(), ONLY_GPU)
    process_group.open_process_group(World(1, 2, 1, 2), SECOND_GPU)
    process_group.open_process_group(World(1, 2, 1, 2), CPU)
    assert [(one["backend"], one["device_id"]) for one in opened] == [
        ("nccl", None),
        ("nccl", SECOND_GPU),
        ("gloo", None),
    ]


@pytest.mark.parametrize("seconds", [0.0, 300.0])
def test_the_watchdog_is_first(seconds, opened):
    """Its report names the rank that is missing; NCCL's ten minutes end a run without."""
    limit = collective_limit(seconds)
    dog = max(seconds * watchdog.FIRST_FACTOR, watchdog.SETUP_SECONDS) if seconds else 24 * 3600.0
    assert limit.total_seconds() >= 2 * dog
    process_group.open_process_group(World(), CPU, limit)
    assert opened[0]["timeout"] == limit


@pytest.mark.parametrize("public", [False, True])
def test_groups_of_libraries_have_the_same_limit(public, monkeypatch):
    """Where torch has a public function, its own one warns of it."""
    given = []
    monkeypatch.setattr(process_group.dist, "is_initialized", lambda: True)
    distributed = process_group.dist.distributed_c10d
    monkeypatch.setattr(distributed, "_world", mock.Mock(pg_map={"world": 1, "another": 2}))
    monkeypatch.delattr(process_group.dist, "set_timeout", raising=False)
    where, name = (process_group.dist, "set_timeout") if public else (distributed, "_set_pg_timeout")
    monkeypatch.setattr(where, name, lambda limit, group: given.append((limit, group)), raising=not public)
    process_group.extend_limits(timedelta(hours=1))
    assert given == [(timedelta(hours=1), "world"), (timedelta(hours=1), "another")]


FILE = ds_config(4, "SGD", 0.1, engine="ddp", steps=1)


def _line(slope=1.0):
    rows = torch.ones(8, 1)
    return dsframe.Task.from_module(
        lambda: torch.nn.Linear(1, 1),
        lambda outputs, targets: (outputs - targets).square().mean() * (1 / slope),
        torch.utils.data.TensorDataset(rows, rows),
    )


def test_a_notebook_goes_on_after_a_run_with_an_error(here):
    """The first had no time to leave its process group."""
    with pytest.raises(ZeroDivisionError):
        dsframe.fit(_line(0), FILE)
    assert dsframe.fit(_line(), FILE).steps == 1


def test_a_process_group_of_the_programs_own_is_named(here):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(WorldError, match=r"initialized torch\.distributed itself.*destroy_process_group"):
            dsframe.fit(_line(), FILE)
    finally:
        dist.destroy_process_group()

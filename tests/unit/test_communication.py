"""Collectives, counted: known collectives of four ranks that are one process with a process group that sends nothing."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.communication import Communication

RANKS = 4


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def ones(count):
    return torch.ones(count)


def world():
    return dist.group.WORLD


def coalesced():
    with dist._coalescing_manager(group=world()):
        dist.all_gather_into_tensor(ones(400), ones(100))
        dist.all_gather_into_tensor(ones(40), ones(10))


KNOWN = {
    "all_reduce": (lambda: dist.all_reduce(ones(1000)), "all-reduce", 4000),
    "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(ones(400), ones(100)), "all-gather", 1600),
    "two at once": (coalesced, "all-gather", 1760),
    "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(ones(100), ones(400)), "reduce-scatter", 1600),
    "all_to_all_single": (lambda: dist.all_to_all_single(ones(400), ones(400)), "all-to-all", 1600),
    "send": (lambda: dist.send(ones(100), 1), "send", 400),
    "a functional all_reduce": (
        lambda: functional.wait_tensor(functional.all_reduce(ones(1000), "sum", world())),
        "all-reduce",
        4000,
    ),
    "a smaller group": (lambda: dist.all_reduce(ones(1000), group=dist.new_group([0, 1])), "all-reduce", 4000),
}


def count(call):
    with Communication() as counted:
        call()
    return counted


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.filterwarnings("ignore:.*_tensor. is deprecated:FutureWarning")
def test_known_collectives(name):
    call, kind, payload = KNOWN[name]
    counted = count(call)
    assert counted.by_kind[kind].calls == 1
    assert counted.by_kind[kind].payload_bytes == payload
    assert set(counted.by_kind) == {kind}


def test_barriers_and_the_end_of_counting():
    with Communication() as counted:
        dist.barrier()
    dist.all_reduce(ones(10))
    assert counted.by_kind == {}


def test_what_cannot_be_counted_says_so():
    with pytest.raises(NotImplementedError, match="isend"), Communication():
        torch.ops._c10d_functional.isend(ones(1), 1, 0, world().group_name)


def test_a_library_that_is_imported_but_not_started_is_no_concern():
    """Other tests of the same process may have had Horovod, and ended it."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    assert count(lambda: dist.all_reduce(ones(10))).by_kind["all-reduce"].calls == 1

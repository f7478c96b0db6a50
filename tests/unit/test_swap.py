"""Folders for NVMe: one for each run and node, and removed by the rank that made it."""

import threading
from types import SimpleNamespace

import pytest
import torch

from dsframe.engines.deepspeed import swap
from dsframe.engines.deepspeed.swap import SwapFolders
from dsframe.errors import EngineError


def test_ranks_of_a_node_share_a_folder_and_nodes_do_not(tmp_path, monkeypatch):
    """Four processes on two nodes, each with its own process id; the number of the run is rank 0's."""
    barrier, tables, here = threading.Barrier(4), {}, threading.local()
    folders = [None] * 4

    def all_reduce(table):
        tables[here.rank] = table.clone()
        barrier.wait(10)
        table.copy_(sum(tables.values()))
        barrier.wait(10)

    monkeypatch.setattr(swap.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(swap.dist, "barrier", lambda: barrier.wait(10))
    monkeypatch.setattr(swap.os, "getpid", lambda: 4_000_000 + here.rank)  # no process has such an id
    monkeypatch.setattr(swap.os, "urandom", lambda count: bytes([here.rank] * count))
    monkeypatch.setattr(swap, "host", lambda: f"node{here.rank // 2}")
    monkeypatch.setattr(swap, "unused_swap", lambda folder: [])

    def one(rank):
        here.rank = rank
        world = SimpleNamespace(rank=rank, size=4, node=rank // 2, local_rank=rank % 2, is_main=rank == 0)
        section = {"device": "nvme", "nvme_path": str(tmp_path)}
        folders[rank] = SwapFolders({"offload_optimizer": section, "offload_param": {"device": "cpu"}}, world, "cpu")

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [f"dsframe-node0-4000000-{0:08x}"] * 2 + [f"dsframe-node1-4000002-{0:08x}"] * 2
    assert [each.paths for each in folders] == [{"offload_optimizer": str(tmp_path / name)} for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(set(names))
    folders[1].remove()
    assert (tmp_path / names[0]).exists()
    folders[0].remove()
    assert [path.name for path in tmp_path.iterdir()] == names[2:3]


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(swap.dist, "all_reduce", lambda table: None)
    world = SimpleNamespace(rank=0, size=1, node=0, local_rank=0, is_main=True)
    section = {"device": "nvme", "nvme_path": str(tmp_path / "missing")}
    with pytest.raises(EngineError, match=r"cannot swap to .*missing: No such file.*choose another nvme_path"):
        SwapFolders({"offload_param": section}, world, torch.device("cpu"))

"""A pipeline's state: of all stages on every rank, and one stage's part of a saved one. Ranks are threads."""

import threading

import torch

from dsframe.engines.deepspeed import state_pipeline
from dsframe.engines.deepspeed.state_pipeline import Column, Share
from dsframe.model.state import EngineState, ParameterState
from tests.engines.snapshot import Snapshot

RANKS = (1, 3, 5)
"""The second rank of each stage."""


def column_of(act, monkeypatch):
    """Returns what ``act(stage, column)`` returns on each stage; objects are sent as by torch.distributed."""
    barrier, sent, results = threading.Barrier(len(RANKS)), {}, {}

    def broadcast(box, source, group):
        here = int(threading.current_thread().name)
        if here == source:
            sent[group] = box[0]
        barrier.wait(10)
        box[0] = sent[group]
        barrier.wait(10)

    def one(stage):
        results[stage] = act(stage, Column("column 1", RANKS, RANKS[stage]))

    monkeypatch.setattr(state_pipeline.dist, "broadcast_object_list", broadcast)
    threads = [threading.Thread(target=one, args=(stage,), name=f"{rank}") for stage, rank in enumerate(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[stage] for stage in range(len(RANKS))]


def test_every_rank_reads_all_stages_in_their_order(monkeypatch):
    """A weight that a later stage borrows is its owner's, as is a buffer of a layer that stages share."""
    flat = torch.arange(100.0)

    def local(stage):
        names = [[("a", 0), ("tied", 1)], [("b", 2)], [("tied", 3), ("c", 4)]][stage]
        for name, start in names:
            piece = flat[start : start + 1]
            yield ParameterState(name, piece, {"exp_avg": piece}, {"step": float(start)})

    def read(stage, column):
        parameters = list(column.parameters(local(stage), frozenset({"tied"} if stage == 2 else ())))
        assert all(len(each.weight.untyped_storage()) == 4 for each in parameters)  # not the flat tensor's
        buffers = column.buffers({"norm": torch.tensor(float(stage)), f"of {stage}": torch.tensor(0.0)})
        return (
            [(p.name, p.weight.tolist(), p.moments["exp_avg"].tolist(), p.scalars["step"]) for p in parameters],
            {name: buffer.item() for name, buffer in buffers.items()},
        )

    numbers = {"a": 0.0, "tied": 1.0, "b": 2.0, "c": 4.0}
    every = [(name, [number], [number], number) for name, number in numbers.items()]
    buffers = {"norm": 0.0, "of 0": 0.0, "of 1": 0.0, "of 2": 0.0}
    assert column_of(read, monkeypatch) == [(every, buffers)] * 3


def test_a_stage_sees_its_own_part():
    parameters = [ParameterState(name, torch.ones(2), {}, {}) for name in "ab"]
    buffers = {"a.norm": torch.zeros(1), "b.norm": torch.ones(1)}
    share = Share(Snapshot(EngineState(3, None, buffers, {}, parameters)), ["b"], ["b.norm"])
    assert (share.shapes, list(share.buffers()), share.updates) == ({"b": (2,)}, ["b.norm"], 3)

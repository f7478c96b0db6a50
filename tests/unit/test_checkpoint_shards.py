"""Who holds and who writes what, and the checkpoints in pieces that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsframe.checkpoint import layout, portable, store
from dsframe.checkpoint.layout import ByteBalancer, agree_on_parameters, plan
from dsframe.checkpoint.portable import Checkpoint
from dsframe.checkpoint.staging import Staging
from dsframe.checkpoint.store import MANIFEST, Store, dump, read_manifest, verify
from dsframe.checkpoint.transfer import ShardWriter
from dsframe.cli import main
from dsframe.errors import CheckpointError
from dsframe.model.state import WEIGHT, ParameterShard, ParameterState, TensorShard, full_precision
from dsframe.tools import export
from tests.unit.test_checkpoint_portable import SIZES, Room, states


def range_of(shape: Sequence[int], first: int, flat: Tensor) -> TensorShard:
    """A range that lies in memory: a view of it, and its first element in the tensor of ``shape``."""
    return TensorShard(tuple(shape), full_precision(flat.dtype), first, flat.numel(), lambda: flat)


def shard(one: ParameterState, rank: int, ranks: int) -> ParameterShard:
    """A rank's share, as ZeRO-3 cuts."""
    count = one.weight.numel()
    each = -(-count // ranks)
    first, last = min(rank * each, count), min((rank + 1) * each, count)
    tensors = {WEIGHT: one.weight, **one.moments}
    ranges = {key: range_of(t.shape, first, t.flatten()[first:last]) for key, t in tensors.items()}
    return ParameterShard(one.name, ranges, one.scalars)


def write(folder: Path, ranks: int, part_bytes: int = 1 << 30) -> Path:
    """A checkpoint of SIZES in the sharded form."""
    whole = Store(folder)
    partial = whole.begin(42)

    def run(room: Any) -> ShardWriter:
        shards = [shard(one, room.plan.world.rank, ranks) for one in states(SIZES)]
        writer = ShardWriter(room, shards, partial, sharded=True, part_bytes=part_bytes)
        assert not writer.exchanges
        writer.keep(Staging(), None, lambda: None)
        writer.write(lambda: None)
        return writer

    writers = Room(ranks).run(run)
    assert all(writer.parameters == writers[0].parameters for writer in writers)
    files = {name: asdict(entry) for writer in writers for name, entry in writer.files.items()}
    manifest = {"format": store.SHARDED_FORMAT, "step": 42, "updates": 40, "files": files, "loss_scale": None}
    return whole.commit(42, {**manifest, "parameters": writers[0].parameters, "aliases": {"tied": "a.weight"}})


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("part_bytes", [1, 3000, 1 << 30])
def test_pieces_are_put_together(tmp_path: Path, ranks: int, part_bytes: int) -> None:
    path = write(tmp_path, ranks, part_bytes)
    assert verify(path) == []
    checkpoint = Checkpoint(path)
    assert checkpoint.shapes == SIZES
    for expected in states(SIZES):
        found = checkpoint.parameter(expected.name)
        assert torch.equal(found.weight, expected.weight)
        assert all(torch.equal(found.moments[key], expected.moments[key]) for key in expected.moments)
        assert found.scalars == {"step": 42.0}
        for first in range(0, expected.weight.numel(), 97):
            size = min(150, expected.weight.numel() - first)
            part = checkpoint.part(expected.name, first, size)
            assert torch.equal(part.weight, expected.weight.flatten()[first : first + size])
            assert torch.equal(part.moments["exp_avg"], expected.moments["exp_avg"].flatten()[first : first + size])
    checkpoint.close()
    if part_bytes == 1 << 30:
        assert len(list(path.glob("shard-*"))) == ranks


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_pieces_are_exported(tmp_path: Path, to: str) -> None:
    write(tmp_path, 3)
    out = tmp_path / "out.bin"
    assert export.main([str(tmp_path), "--to", to, "--out", str(out)]) == 0
    found = load_file(out) if to == "safetensors" else torch.load(out, weights_only=True)
    for one in states(SIZES):
        assert torch.equal(found[one.name], one.weight)
    assert torch.equal(found["tied"], found["a.weight"])


PIECES = [["shard-00000-000.safetensors", 0, 500], ["shard-00001-000.safetensors", 500, 500]]
FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "a gap": (
        {"pieces": [PIECES[0], [PIECES[1][0], 501, 499]]},
        "parameter 'c' has pieces that leave a gap at element 500",
    ),
    "an overlap": (
        {"pieces": [PIECES[0], [PIECES[1][0], 400, 600]]},
        "parameter 'c' has pieces that overlap at element 400",
    ),
    "the same twice": ({"pieces": [*PIECES, PIECES[0]]}, "parameter 'c' has pieces that overlap at element 0"),
    "beyond the shape": (
        {"pieces": [*PIECES, [PIECES[0][0], 1000, 1]]},
        "has pieces of 1001 elements, and 1000 by its shape",
    ),
    "too few": ({"pieces": PIECES[:1]}, "has pieces of 500 elements, and 1000 by its shape"),
    "none": ({"pieces": []}, "lies neither in a file nor in pieces"),
    "both": ({"file": PIECES[0][0]}, "lies in a file and in pieces"),
    "no file of it": ({"pieces": [["../x", 0, 1000]]}, "is in '../x', which is no file of it"),
    "a negative number": ({"pieces": [[PIECES[0][0], -1, 1001]]}, "'parameters.c.pieces.0.1'"),
    "no elements": ({"pieces": [*PIECES, [PIECES[0][0], 1000, 0]]}, "'parameters.c.pieces.2.2'"),
    "text": ({"pieces": "abc"}, "'parameters.c.pieces'"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_range_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "checkpoints", 2)
    manifest = read_manifest(path)
    assert manifest["parameters"]["c"]["pieces"] == PIECES
    changes, message = FORGED[case]
    manifest["parameters"]["c"] |= changes
    (path / MANIFEST).write_bytes(dump(manifest))
    with pytest.raises(CheckpointError) as caught:
        read_manifest(path)
    assert message in str(caught.value)
    assert main(["export", str(path)]) == 8
    assert capsys.readouterr().err.count("\n") == 1


def test_a_piece_that_is_not_as_long_as_said_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    manifest = read_manifest(path)
    manifest["parameters"]["c"]["pieces"] = [[PIECES[0][0], 0, 499], [PIECES[1][0], 499, 501]]
    (path / MANIFEST).write_bytes(dump(manifest))
    checkpoint = Checkpoint(path)
    with pytest.raises(CheckpointError, match=r"/c has shape \[500\] instead of \[499\]"):
        checkpoint.parameter("c")
    checkpoint.close()


@pytest.mark.parametrize("ranges", [[(0, 3), (4, 2)], [(0, 4), (3, 3)], [(0, 3), (3, 2)], [(0, 0), (0, 0)]])
def test_shards_that_do_not_make_the_whole_are_refused(ranges: list[tuple[int, int]]) -> None:
    def run(room: Any) -> str:
        first, size = ranges[room.plan.world.rank]
        own = [ParameterShard("w", {WEIGHT: range_of([2, 3], first, torch.zeros(size))}, {})]
        with pytest.raises(CheckpointError, match=r"do not make weight/w of shape \[2, 3\]") as raised:
            agree_on_parameters(room, own)
        return str(raised.value)

    assert len(set(Room(2).run(run))) == 1


def test_ranks_that_list_others_come_one_after_another() -> None:
    """Stages of a pipeline; a replica of a range is written by one of its holders."""
    one, other, both = (ParameterState(name, torch.zeros(8), {}, {}) for name in "abc")

    def run(room: Any) -> Any:
        rank = room.plan.world.rank
        return agree_on_parameters(room, [shard((one, other)[rank], 0, 1), shard(both, 0, 1)])

    found = Room(2).run(run)[0]
    assert [parameter.name for parameter in found] == ["a", "c", "b"]
    assert [parameter.tensors[WEIGHT].holders[0, 8] for parameter in found] == [[0], [0, 1], [1]]
    dealt = plan(found, 2, 1 << 20, sharded=False)
    assert [(chunk.parameter, chunk.source, chunk.owner) for chunk in dealt.chunks] == [
        ("a", 0, 0),
        ("c", 1, 1),
        ("b", 1, 1),
    ]


@pytest.mark.parametrize("limit", [64, 1000, 1 << 20])
def test_no_rank_sends_or_writes_more_than_a_window(limit: int) -> None:
    def run(room: Any) -> Any:
        return agree_on_parameters(room, [shard(one, room.plan.world.rank, 3) for one in states(SIZES)])

    dealt = plan(Room(3).run(run)[0], 3, 5000, sharded=False)
    windows = list(dealt.windows(limit))
    for window in windows:
        for rank in range(3):
            assert sum(chunk.bytes for chunk in window if chunk.source == rank != chunk.owner) <= limit
            assert 0 <= sum(chunk.bytes for chunk in window if chunk.owner == rank) <= limit
    assert sum(chunk.bytes for window in windows for chunk in window) == sum(one.bytes for one in states(SIZES))


def test_wider_elements_begin_a_file() -> None:
    """safetensors' readers map tensors, which are aligned where none follows a narrower one."""
    balancer = ByteBalancer(1, 1 << 20)
    names = [balancer.file(0, 8, wide, narrow) for wide, narrow in ((4, 4), (4, 4), (8, 4), (4, 4), (8, 8), (8, 4))]
    assert [int(name[11:14]) for name in names] == [0, 0, 1, 1, 2, 2]


def test_a_save_says_which_reader_it_needs(tmp_path: Path) -> None:
    """A dsframe before this one reads format 2 alone, and its message names the number that it finds."""
    assert (store.FORMAT, store.SHARDED_FORMAT) == (2, 3)
    assert read_manifest(write(tmp_path, 2))["format"] == 3
    assert layout.WEIGHT == portable.WEIGHT == "weight"

"""What test_forms.py runs on every rank: one state saved in every form, beside the same state gathered.

    python -m tests.engines.forms CONFIG.json

Rank 0 writes report.json: what differs, by form, and the losses that follow.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.engines.round_trip import build

WAYS = ("portable, at once", "sharded, at once", "portable, in the background", "sharded, in the background")


def main(path: str) -> None:
    engine, steps = build(path)
    import torch

    from dsframe.checkpoint import portable, store
    from dsframe.checkpoint.portable import Checkpoint
    from dsframe.checkpoint.saver import Saver
    from dsframe.checkpoint.store import Retention, Store
    from dsframe.checkpoint.transfer import ShardWriter
    from dsframe.cluster.exchange import all_gather_text
    from dsframe.errors import CheckpointError
    from dsframe.model.state import Snapshot

    world = engine.plan.world
    steps(0, 3)
    kept = Snapshot(engine.state())
    report: dict[str, Any] = {"engine": engine.description}

    window = max(400, max(one.bytes for one in map(kept.parameter, kept.shapes)) // 50)
    # The same files as the gathering way, in windows of a few elements and parts of a few parameters.
    for name in ("gathered", "sent"):
        Path(name).mkdir(exist_ok=True)
    all_gather_text(engine, "")
    state = engine.state()
    gathered = replace(state, parameters=iter(state.parameters))
    old, failure = portable.write_state(gathered, Path("gathered"), world.rank, world.size, None, 2000)
    new = ShardWriter(
        engine, engine.state().parameters.shards, Path("sent"), sharded=False, part_bytes=2000, window_bytes=window
    )
    new.write(lambda: None)
    assert not failure
    told = [json.dumps([{k: asdict(v) for k, v in one.files.items()}, one.parameters]) for one in (old, new)]
    ways = [all_gather_text(engine, text) for text in told]
    report["same files"] = ways[0] == ways[1]
    # And once more, each rank into the files of all.
    if world.is_main:
        Path("in place").mkdir()
    all_gather_text(engine, "")
    placed = ShardWriter(
        engine,
        engine.state().parameters.shards,
        Path("in place"),
        sharded=False,
        part_bytes=2000,
        window_bytes=window,
        sync=False,
    )
    placed.write(lambda: None)
    all_gather_text(engine, "")
    placed.flush(lambda: None)
    told_placed = json.dumps([{k: asdict(v) for k, v in placed.files.items()}, placed.parameters])
    report["same files in place"] = all_gather_text(engine, told_placed) == ways[1]
    report["in place"] = placed._in_place is not None
    report["exchanges"] = new.exchanges

    def go_on() -> list[float]:
        torch.manual_seed(7 + engine.plan.data_rank)
        return steps(3, 6)

    def save(step: int, form: str, when: str) -> Path:
        asynchronous = when == "in the background"
        saver = Saver(
            engine,
            Store(Path("run")),
            {"training": {}, "run": {}},
            every_steps=None,
            at_end=True,
            retention=Retention(last=9),
            asynchronous=asynchronous,
            sharded=form == "sharded",
            say=lambda line: None,
        )
        saver.save(step, loss=None, evaluation={})
        if asynchronous:
            report.setdefault("after", []).append(go_on())  # beside the writing
        saver.settle()
        return Store(Path("run")).path(step)

    paths = {}
    for step, name in enumerate(WAYS, start=1):
        engine.load_state(kept)
        paths[name] = save(step, *name.split(", "))
    all_gather_text(engine, "")
    if world.is_main:
        report["differences"] = {name: different(Checkpoint(path), kept) for name, path in paths.items()}
        report["damaged"] = [line for path in paths.values() for line in store.verify(path)]
        report["formats"] = {name: store.read_manifest(path)["format"] for name, path in paths.items()}
        report["files"] = {name: sorted(one.name for one in path.iterdir()) for name, path in paths.items()}
    report["refused"] = {}
    for step, name in enumerate(paths, start=11):
        engine.load_state(kept)
        with full_disk() if world.rank == 1 else nullcontext():
            try:
                save(step, *name.split(", "))
            except CheckpointError as error:
                report["refused"][name] = str(error)
    report["left"] = sorted(path.name for path in Path("run").iterdir())
    report["repeated"] = {}
    for name, path in paths.items():
        saved = Checkpoint(path, world.rank)
        engine.load_state(saved)
        again = Snapshot(engine.state())
        report["repeated"][name] = [go_on(), same(again, kept)]
        saved.close()
    if world.is_main:
        Path("report.json").write_text(json.dumps(report))
    all_gather_text(engine, "")
    engine.close()
    os._exit(0)  # DeepSpeed's threads at times abort a regular exit


@contextmanager
def full_disk() -> Iterator[None]:
    """Nothing can be written by this process."""
    from dsframe.checkpoint import transfer
    from dsframe.checkpoint.store import FileWriter

    def full(writer: Any, piece: Any) -> None:
        raise OSError(28, "No space left on device", str(writer._path))

    def full_range(path: Any, begin: int, content: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    with mock.patch.object(FileWriter, "write", full), mock.patch.object(transfer, "write_range", full_range):
        yield


def same(one: Any, other: Any) -> bool:
    """True if two saved states have the same parameters, to the bit."""
    return list(one.shapes) == list(other.shapes) and not different(one, other)


def different(saved: Any, kept: Any) -> list[str]:
    """What of ``saved`` is not as in ``kept``: wholes, and ranges read by themselves."""
    import torch

    wrong = [name for name in {*saved.shapes, *kept.shapes} if saved.shapes.get(name) != kept.shapes.get(name)]
    for name in kept.shapes:
        expected, whole = kept.parameter(name), saved.parameter(name)
        count = expected.weight.numel()
        first = count // 3
        part, of_it = saved.part(name, first, count - 2 * first), kept.part(name, first, count - 2 * first)
        for found, wanted in ((whole, expected), (part, of_it)):
            pairs = [(found.weight, wanted.weight), *((found.moments[key], m) for key, m in wanted.moments.items())]
            wrong += [name for a, b in pairs if a.dtype != b.dtype or not torch.equal(a, b)]
            wrong += [f"{name} scalars"] if dict(found.scalars) != dict(wanted.scalars) else []
    return wrong


if __name__ == "__main__":
    main(sys.argv[1])

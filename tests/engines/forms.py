"""What test_forms.py runs on every rank: one state saved in every way, beside the same state in memory.

    python -m tests.engines.forms CONFIG.json

Rank 0 writes report.json: what differs, by way, and the losses that follow.
"""

import os
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

from tests.engines.saved import build, saver
from tests.files import write_json

WAYS = ("at once", "in the background", "gathered")


def main(path):
    engine, steps = build(path)
    import torch

    from dsframe.checkpoint import layout, store
    from dsframe.checkpoint.reader import Checkpoint
    from dsframe.checkpoint.store import Store
    from dsframe.cluster.exchange import all_gather_text
    from dsframe.errors import CheckpointError
    from tests.engines.snapshot import Snapshot, apart, middle

    world = engine.plan.world
    layout.PIECE_BYTES = 400  # so that every rank writes of what all hold
    steps(0, 3)
    kept = Snapshot(engine.state())
    report = {}

    def go_on():
        torch.manual_seed(7 + engine.plan.data_rank)
        return steps(3, 6)

    class Gathering:
        """The engine, whose parameters come one by one, gathered: as a third party's may."""

        plan, sum_over_ranks, buffers = engine.plan, staticmethod(engine.sum_over_ranks), staticmethod(engine.buffers)

        def state(self):
            state = engine.state()
            return replace(state, parameters=iter(state.parameters))

    def save(step, way):
        asynchronous = way == "in the background"
        writing = saver(Gathering() if way == "gathered" else engine, asynchronous=asynchronous)
        writing.save(step, loss=None, evaluation={})
        if asynchronous:
            report.setdefault("after", []).append(go_on())  # beside the writing
        writing.settle()
        return Store(Path("run")).path(step)

    paths = {}
    for step, name in enumerate(WAYS, start=1):
        engine.load_state(kept)
        paths[name] = save(step, name)
    all_gather_text(engine, "")
    if world.is_main:
        saved = {name: Checkpoint(path) for name, path in paths.items()}
        report["differences"] = {name: [apart(one, kept), apart(one, kept, middle)] for name, one in saved.items()}
        assert all(torch.equal(one.buffers()["seen"], kept.buffers()["seen"]) for one in saved.values())
        report["damaged"] = [line for path in paths.values() for line in store.verify(path)]
        files = [{one.name: one.read_bytes() for one in path.glob("[mo]*.safetensors")} for path in paths.values()]
        report["same files"] = bool(files[0]) and all(one == files[0] for one in files)
    report["refused"] = {}
    for step, name in enumerate(paths, start=11):
        engine.load_state(kept)
        with full_disk() if world.rank == 1 else nullcontext():
            try:
                save(step, name)
            except CheckpointError as error:
                report["refused"][name] = str(error)
    report["left"] = sorted(path.name for path in Path("run").iterdir())
    report["repeated"] = {}
    for name, path in paths.items():
        saved = Checkpoint(path, world.rank)
        engine.load_state(saved)
        again = apart(Snapshot(engine.state()), kept)
        report["repeated"][name] = [go_on(), again == 0.0]
        saved.close()
    if world.is_main:
        write_json(Path("report.json"), report)
    all_gather_text(engine, "")
    engine.close()
    os._exit(0)  # DeepSpeed's threads at times abort a regular exit


@contextmanager
def full_disk():
    """Nothing can be written by this process."""
    from dsframe.checkpoint import byte_files

    def full(descriptor, content, begin):
        raise OSError(28, "No space left on device")

    with mock.patch.object(byte_files, "write_at", full):
        yield


if __name__ == "__main__":
    main(sys.argv[1])

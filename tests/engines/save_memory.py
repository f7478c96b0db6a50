"""What test_forms.py runs on every rank: how far a rank's resident set grows while it saves and loads a large parameter.

    python -m tests.engines.save_memory CONFIG.json

Rank 0 writes report.json: bytes, of the rank that grew most.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import peak_memory, settle_memory
from tests.engines.round_trip import build

WINDOW = 8 << 20


def main(path: str) -> None:
    engine, steps = build(path)
    from dsframe.checkpoint import store
    from dsframe.checkpoint.portable import Checkpoint
    from dsframe.checkpoint.staging import Staging
    from dsframe.checkpoint.store import Store
    from dsframe.checkpoint.transfer import ShardWriter
    from dsframe.cluster.exchange import all_gather_text

    world = engine.plan.world
    steps(0, 1)
    shards = engine.state().parameters.shards
    share = sum(t.size * t.dtype.itemsize for one in shards for t in one.tensors.values())
    report: dict[str, float] = {"window": WINDOW, "share": share}

    def grown(action: Callable[[], Any]) -> float:
        all_gather_text(engine, "")
        ctypes.CDLL(None).malloc_trim(0)  # what a step has freed would hide what a save takes
        before = settle_memory()
        action()
        return max(map(int, all_gather_text(engine, str(peak_memory() - before))))

    def save(step: int, *, sharded: bool, keeps: bool = False) -> Path:
        folder = Store(Path("run"))
        if world.is_main:
            folder.begin(step)
        all_gather_text(engine, "")
        writer = ShardWriter(engine, shards, folder.partial(step), sharded=sharded, window_bytes=WINDOW)
        if keeps:
            writer.keep(Staging(), None, lambda: None)
        writer.write(lambda: None)
        told = all_gather_text(engine, json.dumps({name: asdict(entry) for name, entry in writer.files.items()}))
        if world.is_main:
            files = {name: entry for text in told for name, entry in json.loads(text).items()}
            manifest = {"format": store.SHARDED_FORMAT, "step": step, "updates": 1, "loss_scale": None, "files": files}
            folder.commit(step, {**manifest, "parameters": writer.parameters})
        all_gather_text(engine, "")
        return folder.path(step)

    def load(path: Path) -> None:
        saved = Checkpoint(path)
        saved.buffers = engine.buffers  # type: ignore[method-assign]
        engine.load_state(saved)
        saved.close()

    report["portable"] = grown(lambda: save(2, sharded=False))
    report["sharded"] = grown(lambda: save(3, sharded=True))
    report["portable, kept"] = grown(lambda: save(4, sharded=False, keeps=True))
    report["portable, loaded"] = grown(lambda: load(Path("run/step-00000002")))
    report["sharded, loaded"] = grown(lambda: load(Path("run/step-00000003")))
    if world.is_main:
        Path("report.json").write_text(json.dumps(report))
    all_gather_text(engine, "")
    engine.close()
    os._exit(0)  # DeepSpeed's threads at times abort a regular exit


if __name__ == "__main__":
    main(sys.argv[1])

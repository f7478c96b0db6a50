"""What test_forms.py runs on every rank: how far a rank's resident set grows while it saves and loads a large parameter.

    python -m tests.engines.save_memory CONFIG.json

Rank 0 writes report.json: bytes, of the rank that grew most.
"""

import ctypes
import os
import sys
from pathlib import Path

from benchmarks.checkpoint import peak_memory, settle_memory
from tests.engines.saved import build, saver
from tests.files import write_json


def main(path):
    engine, steps = build(path)
    from dsframe.checkpoint.reader import Checkpoint
    from dsframe.cluster.exchange import all_gather_text

    world = engine.plan.world
    steps(0, 1)
    shards = engine.state().parameters.shards
    report = {"share": sum(t.size * t.dtype.itemsize for one in shards for t in one.tensors.values())}

    def grown(action):
        all_gather_text(engine, "")
        ctypes.CDLL(None).malloc_trim(0)  # what a step has freed would hide what a save takes
        before = settle_memory()
        action()
        return max(map(int, all_gather_text(engine, str(peak_memory() - before))))

    def save(step, *, keeps=False):
        writing = saver(engine, asynchronous=keeps)
        writing.save(step, loss=None, evaluation={})
        writing.settle()

    def load(path):
        saved = Checkpoint(path)
        saved.buffers = engine.buffers
        engine.load_state(saved)
        saved.close()

    report["at once"] = grown(lambda: save(2))
    report["kept"] = grown(lambda: save(3, keeps=True))
    report["loaded"] = grown(lambda: load(Path("run/step-00000003")))
    if world.is_main:
        write_json(Path("report.json"), report)
    all_gather_text(engine, "")
    engine.close()
    os._exit(0)  # DeepSpeed's threads at times abort a regular exit


if __name__ == "__main__":
    main(sys.argv[1])

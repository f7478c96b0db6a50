"""What test_forms.py runs on two ranks: one is gone in the middle of a save in the background, and the other's thread ends.

python -m tests.engines.lost_peer CONFIG.json
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.engines.round_trip import build


def main(path: str) -> None:
    engine, steps = build(path)
    from dsframe.checkpoint.saver import Saver
    from dsframe.checkpoint.store import Retention, Store
    from dsframe.checkpoint.writer import Writer

    steps(0, 1)
    if not engine.plan.world.is_main:
        Writer.flush = lambda *_: time.sleep(1) or os._exit(0)  # type: ignore[func-returns-value,method-assign]
    saver = Saver(
        engine,
        Store(Path("run")),
        {"training": {}, "run": {}},
        every_steps=None,
        at_end=True,
        retention=Retention(),
        asynchronous=True,
        say=lambda line: None,
    )
    saver.save(1, loss=None, evaluation={})
    assert saver._writing is not None
    saver.close(hopeless=True)
    Path("report.txt").write_text(f"{Store(Path('run')).newest_first()}")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

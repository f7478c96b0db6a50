"""``dsframe.train`` on the stand-in: ``python -m tests.standin.train FOLDER ARGUMENTS...`` leaves ``FOLDER/rank-N.json``.

Each event has the phase in which it happened: "set-up", "step 3", and in it "log 3", "save 3", "evaluation 3"; "end".
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.standin import switch_on


def in_phase(owner: Any, name: str, phase: Callable[..., str]) -> None:
    """Has ``owner.name`` note its phase while it runs."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noting(*arguments: Any, **named: Any) -> Any:
        before, switch_on.phase = switch_on.phase, phase(*arguments)
        peaks.setdefault(before, switch_on.usage())
        try:
            return original(*arguments, **named)
        finally:
            peaks[switch_on.phase] = switch_on.usage()
            switch_on.phase = before

    setattr(owner, name, noting)


peaks: dict[str, tuple[int, int]] = {}
"""Bytes live and at peak when a phase ended."""


def record(folder: Path) -> None:
    """Notes phases, and writes everything when the process ends."""
    from dsframe import job
    from dsframe.trainer import Trainer

    switch_on.phase = "set-up"
    original = job.make_engine

    def make_engine(*arguments: Any) -> Any:
        made = original(*arguments)
        peaks["engine"] = switch_on.usage()
        return made

    job.make_engine = make_engine
    in_phase(Trainer, "fit", lambda *_: "training")
    in_phase(Trainer, "_train_step", lambda _, step, *__: f"step {step}")
    in_phase(Trainer, "_log", lambda _, step, *__: f"log {step}")
    in_phase(Trainer, "_save", lambda _, step, *__: f"save {step}")
    in_phase(Trainer, "_evaluate", lambda _, step, *__: f"evaluation {step}")
    folder.mkdir(parents=True, exist_ok=True)
    leave = os._exit

    def write(code: int) -> None:
        content = {"events": switch_on.events, "usage": peaks, "last": switch_on.usage()}
        (folder / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(content))
        leave(code)

    os._exit = write  # type: ignore[assignment]


if __name__ == "__main__":
    from dsframe.train import leave_at_once, main

    record(Path(sys.argv.pop(1)))
    leave_at_once(main())

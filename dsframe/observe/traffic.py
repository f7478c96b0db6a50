"""``comms_logger``: what each rank sends and receives, counted the same on every engine (``dsframe.observe.communication``).

Calls and bytes only: to take a collective's time one would have to wait for it, and what is measured then is another training,
in which nothing overlaps. Times are in the traces (``dsframe.profile``) and in Horovod's timeline.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsframe.cluster.exchange import all_gather_text
from dsframe.config.rules.report import kind_of
from dsframe.observe.communication import Communication
from dsframe.observe.observer import Observer, ObserverContext

if TYPE_CHECKING:
    from dsframe.config.schema.monitor import CommsLogger
    from dsframe.engine import Engine

FILE = "communication.json"
"""In the run's directory."""
_LIBRARIES = ("/torch/", "/deepspeed/", "/horovod/", "/dsframe/observe/", "/contextlib.py", "/unittest/")


class _Counter(Communication):  # type: ignore[no-untyped-call]
    """Counts the kinds that are asked for."""

    def __init__(self, section: CommsLogger, say: Callable[[str], None]) -> None:
        super().__init__()
        self._kinds = None if section.prof_all else {kind_of(name) for name in section.prof_ops}
        self._verbose, self._debug, self._say = section.verbose, section.debug, say
        self.step = 0

    def add(self, kind: str, payload: int, ranks: int, label: str = "") -> None:
        if self._kinds is not None and kind not in self._kinds:
            return
        caller = f", by {_caller()}" if self._debug else ""
        super().add(kind, payload, ranks, label + caller)
        if self._verbose:
            self._say(f"step {self.step}: {kind} of {payload:,} bytes among {ranks} ranks{caller}")


def observer(context: ObserverContext) -> Observer:
    """This rank's counts."""
    section = context.plan.config.deepspeed.comms_logger
    assert section is not None
    return TrafficLog(section, context.plan.directory, context.say)


class TrafficLog(Observer):
    """Of one rank, over the whole of its training steps."""

    def __init__(self, section: CommsLogger, directory: Path, say: Callable[[str], None]) -> None:
        self._counter, self._say = _Counter(section, say), say
        self._file, self._steps, self._mark = directory / FILE, 0, (0, 0.0)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        self._counter.step = step
        with self._counter:
            yield
        self._steps += 1

    def figures(self, rate: float) -> Mapping[str, float]:
        """Bytes that this rank sent in a step, the mean since the last call."""
        steps, sent = self._mark
        self._mark = (self._steps, self._counter.bytes_sent)
        return {"sent_bytes": (self._mark[1] - sent) / max(self._mark[0] - steps, 1)}

    def finish(self, engine: Engine) -> None:
        """**Collective.** Rank 0 writes down what all ranks counted, and says what the busiest rank sent. Where no step was
        taken it says nothing, and what an earlier process counted stays."""
        if (steps := self._steps) == 0:
            return
        mine = {kind: asdict(traffic) for kind, traffic in self._counter.by_kind.items()}
        found = [json.loads(text) for text in all_gather_text(engine, json.dumps(mine))]
        if engine.plan.world.is_main:
            content = {"steps": self._steps, "ranks": found}
            self._file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        busiest = max(found, key=lambda kinds: sum(one["sent_bytes"] for one in kinds.values()))
        parts = [
            f"{one['calls'] / steps:.4g} {kind} of {one['payload_bytes'] / steps / 1e6:.4g} MB"
            for kind, one in sorted(busiest.items())
        ]
        total = sum(one["sent_bytes"] for one in busiest.values())
        rank = found.index(busiest)
        self._say(
            f"dsframe: communication in a step, counted: rank {rank} sent {total / steps / 1e6:.4g} MB "
            f"({', '.join(parts) or 'none'}); all of it in {self._file}"
        )


def _caller() -> str:
    """The function that had it sent: the innermost that is not one of the libraries."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _LIBRARIES):
        frame = frame.f_back
    return str(frame.f_code.co_qualname) if hasattr(frame.f_code, "co_qualname") else str(frame.f_code.co_name)

"""``comms_logger``: what each rank sends and receives, counted the same on every engine.

Calls and bytes only: to take a collective's time one would have to wait for it, which is another
training, in which nothing overlaps. Times are in the traces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.cluster.exchange import all_gather_text
from dsframe.observe.communication import Communication
from dsframe.observe.observer import Observer, ObserverContext

if TYPE_CHECKING:
    from dsframe.events import Training

FILE = "communication.json"
"""In the run's directory."""


def observer(context: ObserverContext) -> Observer:
    """This rank's counts."""
    return TrafficLog(context.plan.directory, context.say)


class TrafficLog(Observer):
    """Of one rank, over the whole of its training steps."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._counter, self._say = Communication(), say
        self._file, self._steps, self._reported = directory / FILE, 0, (0, 0.0)

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        with self._counter:
            yield
        self._steps += 1

    def figures(self) -> Mapping[str, float]:
        """Bytes that this rank sent in a step, the mean since the last call."""
        steps, sent = self._reported
        self._reported = (self._steps, self._counter.bytes_sent)
        return {"sent_bytes": (self._reported[1] - sent) / max(self._reported[0] - steps, 1)}

    def on_finish(self, training: Training) -> None:
        """**Collective.** Rank 0 writes what all ranks counted. Where no step was taken, what an
        earlier process counted stays."""
        if not self._steps:
            return
        mine = {kind: asdict(traffic) for kind, traffic in self._counter.by_kind.items()}
        ranks = [json.loads(text) for text in all_gather_text(training.engine, json.dumps(mine))]
        if training.engine.plan.world.is_main:
            text = json.dumps({"steps": self._steps, "ranks": ranks}, indent=2)
            self._file.write_text(text + "\n", encoding="utf-8")
        sent = [sum(kind["sent_bytes"] for kind in rank.values()) / self._steps / 1e6 for rank in ranks]
        most = f"rank {sent.index(max(sent))} sent {max(sent):.4g} MB"
        self._say(f"dsframe: communication in a step, counted: {most}; all of it in {self._file}")

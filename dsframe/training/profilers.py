"""What the file asks to measure (``dsframe.observe``), as a listener."""

from __future__ import annotations

from contextlib import AbstractContextManager

from dsframe.engine import StepResult
from dsframe.events import Listener, LogEntry, Training
from dsframe.observe.observer import Observers


class Profilers(Listener):
    """All observers that the file switches on."""

    def __init__(self, observers: Observers) -> None:
        self._observers = observers

    def around_step(self, step: int) -> AbstractContextManager[None]:
        return self._observers.step(step)

    def on_step(self, training: Training, result: StepResult) -> None:
        training.pause(self._observers.paused(training.step))

    def on_log(self, training: Training, entry: LogEntry) -> None:
        entry.details |= self._observers.figures(entry.rate)

    def on_finish(self, training: Training) -> None:
        self._observers.finish(training.engine)

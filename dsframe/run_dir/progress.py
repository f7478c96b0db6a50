"""A run's terminal output: permanent lines, and in a terminal a progress bar below them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsframe.host.streams import TolerantStream
from dsframe.run_dir import blocks
from dsframe.text import clock, has_colours, mebibytes, shown


class Progress:
    """Terminal output of rank 0. Prints nothing on other ranks or with ``quiet``."""

    def __init__(
        self, total_steps: int, *, speaks: bool, unit: str, units_per_step: int, home: Path | None = None
    ) -> None:
        """``unit``: what is counted, "samples" or "tokens"; ``units_per_step``: units in a global batch; ``home``: the
        folder that printed paths are relative to."""
        self._prefix = f"{home}{os.sep}" if home else ""
        self._speaks = speaks
        self._unit = unit
        self._units_per_step = units_per_step
        self._total = total_steps
        self._mark = (0, time.perf_counter())
        self._pace = 0.0
        self._stream = TolerantStream(sys.stderr)
        self._bar: Any = None
        self._evaluation: Any = None
        if speaks and sys.stderr.isatty():
            self._bar = _line(total_steps, "step", self._stream)

    def say(self, line: str) -> None:
        """Prints a permanent line. Training continues if it cannot be written (closed pipe, full disk)."""
        if not self._speaks:
            return
        if self._prefix:
            line = line.replace(self._prefix, "")
        with self._cleared(), contextlib.suppress(OSError):
            # One write, because launchers prefix each.
            print(shown(line, sys.stderr) + "\n", end="", file=sys.stderr, flush=True)

    def _cleared(self) -> contextlib.AbstractContextManager[Any]:
        """Context without progress bars on the terminal, for a permanent line."""
        if self._bar is None:
            return contextlib.nullcontext()
        from tqdm import tqdm

        mode: contextlib.AbstractContextManager[Any] = tqdm.external_write_mode(file=self._stream)
        return mode

    def block(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a title and labelled lines below it."""
        for line in (title, *blocks.lines(rows, colour=has_colours(sys.stderr))):
            self.say(line)

    def begin(self, step: int) -> None:
        """Starts rates and the progress bar at ``step`` and now."""
        self._mark = (step, time.perf_counter())
        if self._bar is not None:
            self._bar.n = step
            self._bar.refresh()

    def advance(self) -> None:
        """Counts one step. Free without a terminal."""
        if self._bar is not None:
            self._bar.update()

    @contextlib.contextmanager
    def evaluation(self, batches: int) -> Iterator[None]:
        """Context for an evaluation of so many batches per rank, with its own progress bar."""
        if self._bar is None:
            yield
            return
        self._evaluation = _line(batches, "batch", self._stream, "evaluation")
        try:
            yield
        finally:
            self._evaluation.close()
            self._evaluation = None

    def evaluated(self) -> None:
        """Counts one batch of an evaluation."""
        if self._evaluation is not None:
            self._evaluation.update()

    def rate(self, step: int) -> float:
        """Returns units per second since the last call, which was at an earlier step."""
        before, then = self._mark
        now = time.perf_counter()
        self._mark = (step, now)
        self._pace = max(now - then, 1e-9) / (step - before)
        return self._units_per_step / self._pace

    def pause(self, seconds: float) -> None:
        """Excludes time spent on something else (evaluation) from the rate."""
        step, then = self._mark
        self._mark = (step, then + seconds)

    def log(self, step: int, values: Mapping[str, float], rate: float, memory: int) -> None:
        """Prints the state of training at ``step``. Without a progress bar the line includes the remaining time.

        ``rate``: 0 if unknown, after the first step. ``memory``: bytes.
        """
        if not self._speaks:
            return
        parts = [f"{name} {value:.5g}" for name, value in values.items()]
        if rate:
            parts.append(f"{rate:,.0f} {self._unit}/s")
        parts.append(mebibytes(memory))
        if rate and self._bar is None:
            parts.append(f"{clock(self._pace * (self._total - step))} left")
        self.say(f"step {step:>{len(str(self._total))}}/{self._total}  {'  '.join(parts)}")

    def close(self) -> None:
        """Removes the progress bar."""
        if self._bar is not None:
            self._bar.close()


def _line(total: int, unit: str, stream: Any, name: str | None = None) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, desc=name, dynamic_ncols=True, leave=False, file=stream)

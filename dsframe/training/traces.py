"""``dsframe.profile``: traces of torch's profiler, each rank's own, in the run's directory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, schedule

from dsframe.events import Listener, Training
from dsframe.text import Say

if TYPE_CHECKING:
    from dsframe.config.schema.settings_report import Profile
    from dsframe.engine import StepResult
    from dsframe.model.plan import Plan

FOLDER = "profile"
"""In the run's directory."""
_ROWS = 25
"""Of a table."""


class Traces(Listener):
    """One rank's profiler. Nothing is slower outside of the steps that it looks at."""

    def __init__(self, plan: Plan, section: Profile, done: int, say: Say) -> None:
        """``done``: steps before this process's first. On a rank that ``section`` does not name it only says where they are."""
        self._folder, self._rank, self._say = plan.directory / FOLDER, plan.world.rank, say
        self._active, self._waits = section.active, section.wait + section.warmup
        self._done = self._step = self._written = done
        self._on_gpu = plan.device.type == "cuda"
        self._ends = done + section.steps
        self._profiler: Any = None
        self._began = False
        if section.ranks == "all" or self._rank in section.ranks:
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in [] if done else self._folder.glob(f"rank{self._rank}-steps-*"):
                old.unlink()
            self._profiler = self._made(section)

    def _made(self, section: Profile) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a warm-up of 0, which the file has chosen
            steps = schedule(wait=section.wait, warmup=section.warmup, active=section.active, repeat=section.repeat)
        return profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=steps,
            on_trace_ready=self._write,
            profile_memory=section.memory,
            record_shapes=section.shapes,
            with_stack=section.stacks,
        )

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Starts the profiler before the first step."""
        if self._profiler is not None and not self._began:
            self._profiler.start()
            self._began = True
        yield

    def on_step(self, training: Training, result: StepResult) -> None:
        """Tells the profiler that a step is done; the last one of a trace writes it, which is no training time."""
        self._step = step = training.step
        if self._profiler is None:
            return
        began = time.perf_counter()
        self._profiler.step()
        if step == self._ends:
            self._close()
        training.pause(time.perf_counter() - began)

    def on_finish(self, training: Training) -> None:
        """Says where the traces are."""
        self._close()
        first = self._done + self._waits
        self._say(
            f"dsframe: traces are in {self._folder}; open them in https://ui.perfetto.dev"
            if self._step > first
            else f"dsframe: no trace: the first one would be of step {first + 1}"
        )

    def _close(self) -> None:
        """Ends it; a trace that has not all of its steps is written with those that it has."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None and self._began:
            profiler.stop()

    def _write(self, profiler: Any) -> None:
        whole = self._waits + self._active
        steps = ((self._step - self._done - 1) % whole + 1) - self._waits
        if steps < 1 or self._step == self._written:
            return  # ended where the next one would have begun
        self._written = self._step
        name = f"rank{self._rank}-steps-{self._step - steps + 1}-{self._step}"
        profiler.export_chrome_trace(str(self._folder / f"{name}.trace.json.gz"))
        order = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=_ROWS)
        (self._folder / f"{name}.txt").write_text(f"{table}\n", encoding="utf-8")

"""``dsframe.profile``: traces of torch's profiler, each rank's own, in the run's directory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

if TYPE_CHECKING:
    from dsframe.config.settings_report import Profile

FOLDER = "profile"
"""In the run's directory."""
_ROWS = 25
"""Of a table."""


class Traces:
    """One rank's profiler. Nothing is slower outside of the steps that it looks at."""

    def __init__(self, section: Profile, directory: Path, rank: int, done_steps: int, device: torch.device) -> None:
        """``done_steps``: taken before the process's first."""
        self._folder, self._rank, self._active, self._step = directory / FOLDER, rank, section.active, done_steps
        self._waits, self._done, self._written = section.wait + section.warmup, done_steps, done_steps
        self._on_gpu = device.type == "cuda"
        self._ends = done_steps + section.steps
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in [] if done_steps else self._folder.glob(f"rank{rank}-steps-*"):
            old.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a warm-up of 0, which the file has chosen
            steps = schedule(wait=section.wait, warmup=section.warmup, active=section.active, repeat=section.repeat)
        self._profiler: Any = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=steps,
            on_trace_ready=self._write,
            profile_memory=section.memory,
            record_shapes=section.shapes,
            with_stack=section.stacks,
        )
        self._began = False

    def begin(self) -> None:
        """Before each optimizer step."""
        if self._profiler is not None and not self._began:
            self._profiler.start()
            self._began = True

    def stepped(self, step: int) -> None:
        """After each optimizer step."""
        if self._profiler is None:
            return
        self._step = step
        self._profiler.step()
        if step == self._ends:
            self.close()

    def close(self) -> None:
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

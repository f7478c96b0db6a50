"""What watches a training from outside, as the file asks for it: traces, counts of operations, counts of bytes sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.report.flops import FlopsProfile
from dsframe.report.traces import FOLDER, Traces
from dsframe.report.traffic import FILE, TrafficLog

if TYPE_CHECKING:
    from dsframe.engine import Engine, Plan


class Observer:
    """One rank's. Costs nothing where the file asks for nothing."""

    def __init__(
        self, plan: Plan, directory: Path, done_steps: int, total_steps: int, say: Callable[[str], None]
    ) -> None:
        """``done_steps``: taken before the first one of this process. ``say``: rank 0's voice, silent on others."""
        file, settings, rank = plan.config.deepspeed, plan.config.settings, plan.world.rank
        self._say, self._directory = say, directory
        profile, logger = settings.profile, file.comms_logger
        self._untraced_until = done_steps + profile.wait + profile.warmup if profile is not None else 0
        self._last = done_steps
        traced = profile is not None and (profile.ranks == "all" or rank in profile.ranks)
        self._traces = Traces(profile, directory, rank, done_steps, plan.device) if profile and traced else None
        self._traffic = TrafficLog(logger, directory, say) if logger is not None and logger.enabled else None
        counts = file.flops_profiler.enabled and plan.world.is_main
        self._flops = (
            FlopsProfile(file.flops_profiler, plan.batch.accumulation_steps, done_steps, total_steps, plan.device, say)
            if counts
            else None
        )

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one optimizer step, counted from 1."""
        if self._traces:
            self._traces.begin()
        with ExitStack() as stack:
            if self._traffic:
                stack.enter_context(self._traffic.step(step))
            if self._flops:
                stack.enter_context(self._flops.step(step))
            yield

    def stepped(self, step: int) -> float:
        """After it. Returns how long the training stood still for what was written, in seconds."""
        began, self._last = time.perf_counter(), step
        if self._traces:
            self._traces.stepped(step)
        return time.perf_counter() - began

    def figures(self) -> Mapping[str, float]:
        """For the record, since the last call."""
        return {"sent_bytes": self._traffic.sent_bytes()} if self._traffic else {}

    def finish(self, engine: Engine) -> None:
        """**Collective.** After the last step, or the one after which a signal stops all ranks: writes what is still held, and
        says where it is."""
        if self._traces:
            self._traces.close()
        if engine.plan.config.settings.profile is not None:
            self._say(
                f"dsframe: traces are in {self._directory / FOLDER}; open them in https://ui.perfetto.dev"
                if self._last > self._untraced_until
                else f"dsframe: no trace: the first one would be of step {self._untraced_until + 1}"
            )
        if self._traffic and (said := self._traffic.close(engine)):
            self._say(f"dsframe: {said}; all of it in {self._directory / FILE}")

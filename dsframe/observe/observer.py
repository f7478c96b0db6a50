"""What watches a training from outside: the seam between the loop and the observers that the file switches on."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsframe.checkpoint import generators

if TYPE_CHECKING:
    from dsframe.config import Config
    from dsframe.engine import Engine
    from dsframe.model.plan import Plan


@dataclass(frozen=True)
class ObserverContext:
    """The steps that one process is going to take, as an observer sees them."""

    plan: Plan
    done_steps: int
    """Taken before this process's first one."""
    total_steps: int
    say: Callable[[str], None]
    """Rank 0's voice, silent on others."""


class Observer:
    """One rank's. An observer overrides what it needs; the training does not depend on any of it."""

    def start(self, engine: Engine) -> Mapping[str, Any]:
        """**Collective.** Before the first step. Returns what the run's record should say of the run."""
        return {}

    def step(self, step: int) -> AbstractContextManager[None]:
        """Around one optimizer step, counted from 1."""
        return nullcontext()

    def stepped(self, step: int) -> None:
        """After it. What this takes is no training time."""

    def figures(self, rate: float) -> Mapping[str, float]:
        """At a step that is logged: what has happened since the last such step. ``rate``: units a second, 0 if unknown."""
        return {}

    def finish(self, engine: Engine) -> None:
        """**Collective.** After the last step, or the one after which a signal stops all ranks: writes what is still held."""

    def results(self, rate: float) -> Mapping[str, Any]:
        """After a training that came to its end: what ``summary.json`` should say. ``rate``: of the run."""
        return {}


@dataclass(frozen=True)
class Switch:
    """When an observer is on, and where it is: a module here with ``observer(context) -> Observer | None``."""

    on: Callable[[Config], bool]
    module: str


TABLE: Mapping[str, Switch] = {
    "dsframe.profile": Switch(lambda config: config.settings.profile is not None, "traces"),
    "comms_logger": Switch(lambda config: _logs_communication(config), "traffic"),
    "flops_profiler": Switch(lambda config: config.deepspeed.flops_profiler.enabled, "flops"),
    "dsframe.mfu": Switch(lambda config: config.settings.mfu, "utilization"),
}
"""By the key of the file that switches it on. A module is imported only then. Each is entered inside the one above it."""


def _logs_communication(config: Config) -> bool:
    logger = config.deepspeed.comms_logger
    return logger is not None and logger.enabled


class Observers(Observer):
    """All that the file switches on, as one. Costs nothing where it asks for nothing."""

    def __init__(self, context: ObserverContext) -> None:
        wanted = [switch.module for switch in TABLE.values() if switch.on(context.plan.config)]
        made = [importlib.import_module(f"dsframe.observe.{module}").observer(context) for module in wanted]
        self._all: list[Observer] = [one for one in made if one is not None]

    def start(self, engine: Engine) -> Mapping[str, Any]:
        """**Collective.** What all of them tell of the run. Training's random generators stay where they are."""
        if not self._all:
            return {}
        device = engine.plan.device
        kept = generators.capture(device)
        found = {name: value for one in self._all for name, value in one.start(engine).items()}
        generators.restore(kept, device)
        return found

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self._all:
                stack.enter_context(one.step(step))
            yield

    def stepped(self, step: int) -> None:
        for one in self._all:
            one.stepped(step)

    def paused(self, step: int) -> float:
        """:meth:`stepped`; returns how long the training stood still for what was written, in seconds."""
        began = time.perf_counter()
        self.stepped(step)
        return time.perf_counter() - began

    def figures(self, rate: float) -> Mapping[str, float]:
        return {name: value for one in self._all for name, value in one.figures(rate).items()}

    def finish(self, engine: Engine) -> None:
        """**Collective.** Ends all of them."""
        for one in self._all:
            one.finish(engine)

    def results(self, rate: float) -> Mapping[str, Any]:
        """Results of all of them."""
        return {name: value for one in self._all for name, value in one.results(rate).items()}

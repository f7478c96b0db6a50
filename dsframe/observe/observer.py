"""What the file asks to measure: listeners of a training's events."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsframe.events import Listener, LogEntry, Training

if TYPE_CHECKING:
    from dsframe.config.value import Config
    from dsframe.engine import StepResult
    from dsframe.model.plan import Plan


@dataclass(frozen=True)
class ObserverContext:
    """The steps that one process is going to take, as an observer sees them."""

    plan: Plan
    done_steps: int
    """Taken before this process's first one."""
    total_steps: int
    say: Callable[[str], None]
    """Prints on rank 0, silent on others."""


class Observer(Listener):
    """A listener that measures on one rank; the training depends on none of it."""

    def figures(self) -> Mapping[str, float]:
        """At a logged step: what happened since the last such step."""
        return {}


def wanted(config: Config) -> list[str]:
    """The modules of the observers that the file switches on, imported only then. Each is entered
    inside the one before it."""
    logger = config.deepspeed.comms_logger
    switches = {
        "traces": config.settings.profile is not None,
        "traffic": logger is not None and logger.enabled,
        "flops": config.deepspeed.flops_profiler.enabled,
    }
    return [module for module, on in switches.items() if on]


class Observers(Observer):
    """All that the file switches on, as one. Costs nothing where it asks for nothing."""

    def __init__(self, context: ObserverContext) -> None:
        modules = (importlib.import_module(f"dsframe.observe.{name}") for name in wanted(context.plan.config))
        made = [module.observer(context) for module in modules]
        self._all: list[Observer] = [observer for observer in made if observer is not None]

    @property
    def are_on(self) -> bool:
        """True if the file switches one on."""
        return bool(self._all)

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self._all:
                stack.enter_context(observer.around_step(step))
            yield

    def on_step(self, training: Training, result: StepResult) -> None:
        """What observers take is no training time."""
        began = time.perf_counter()
        for observer in self._all:
            observer.on_step(training, result)
        training.pause(time.perf_counter() - began)

    def on_log(self, training: Training, entry: LogEntry) -> None:
        for observer in self._all:
            entry.details |= observer.figures()

    def on_finish(self, training: Training) -> None:
        """**Collective.** Ends all of them."""
        for observer in self._all:
            observer.on_finish(training)

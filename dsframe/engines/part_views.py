"""One model's part of the file and of the saved state, if a task has several, and what all models share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from dsframe.config.value import Config
from dsframe.data.sample_draws import DrawTrial
from dsframe.engine import StepResult
from dsframe.engines.base import ModelEngine
from dsframe.errors import ConfigError, EngineError
from dsframe.model import extra_state
from dsframe.model.persistent import put
from dsframe.model.state import SavedState, SavedView, Shapes
from dsframe.tasks.average_of import AverageOf
from dsframe.tasks.task import Sum
from dsframe.values import Tensors


def terms_of(results: Mapping[str, StepResult], several: bool) -> dict[str, Sum]:
    """Returns the terms that the losses returned; with ``several`` losses, also the losses themselves."""
    terms: dict[str, Sum] = {}
    for name, result in results.items():
        if several:
            terms[f"{name}_loss"] = Sum(result.loss.detach(), 1)
        terms.update(result.terms)
    return terms


def groups_of(groups: Iterable[Any], others: Collection[str]) -> list[Any]:
    """Removes patterns that begin with the name of another trained model, and groups that are left without patterns."""
    kept = []
    for group in groups:
        match = group.get("match") if isinstance(group, Mapping) else None
        patterns = [pattern for pattern in match or () if str(pattern).partition(".")[0] not in others]
        if patterns or not match:  # invalid groups are reported elsewhere
            kept.append({**group, "match": patterns} if patterns else group)
    return kept


def config_of(config: Config, name: str, others: Collection[str], *, frozen: bool) -> Config:
    """Returns the file for one model's engine: with its optimizer and groups. Raises ConfigError, EngineError."""
    raw = config.written()
    section = raw.get("dsframe", {})
    if not section.keys() & {"optimizers", "parameter_groups", "model"}:
        return config
    optimizer = section.pop("optimizers", {}).get(name)
    if optimizer is not None:
        raw["optimizer"] = {key: value for key, value in optimizer.items() if key != "every_steps"}
    if frozen:
        section.get("model", {}).pop("activation_checkpointing", None)
    groups = groups_of(section.pop("parameter_groups", []), others)
    if groups and not frozen:
        section["parameter_groups"] = groups
    try:
        loaded = config.with_content(raw)
    except ConfigError as error:
        whose = f"with dsframe.optimizers.{name}: "
        raise ConfigError([replace(problem, message=whose + problem.message) for problem in error.problems]) from None
    known = {feature.name for feature in config.features}
    for feature in loaded.features:
        if feature.name not in known:
            raise EngineError(f"dsframe.optimizers.{name}: {feature.description} is not possible with several models")
    return loaded


class SavedPart(SavedView):
    """The part of a saved state that belongs to one model."""

    def __init__(self, saved: SavedState, name: str, every: int) -> None:
        super().__init__(saved)
        self._prefix, self._every = f"{name}.", every

    @property
    def updates(self) -> int:
        return self._saved.updates // self._every

    @property
    def shapes(self) -> Shapes:
        return {name: shape for name, shape in self._saved.shapes.items() if name.startswith(self._prefix)}

    def buffers(self) -> Tensors:
        return {name: buffer for name, buffer in self._saved.buffers().items() if name.startswith(self._prefix)}


class Draws:
    """Knows whether any model or loss draws random numbers in training."""

    def __init__(self, every: Sequence[DrawTrial]) -> None:
        self._every = every

    @property
    def moved(self) -> bool:
        """True once one has drawn."""
        return any(trial.moved for trial in self._every)


class Calls:
    """The calls of all engines that compare them, for the watchdog."""

    def __init__(self, every: Mapping[str, Any]) -> None:
        self._every, self._log = every, list[str]()
        for calls in every.values():
            calls.log = self._log

    def begin(self) -> None:
        """Notes that a step begins."""
        self._log.clear()

    def connect(self, store: Any) -> None:
        """Connects each to ``store``."""
        for name, calls in self._every.items():
            calls.connect(PrefixStore(name, store))

    def difference(self, store: Any, moment: str) -> str:
        """Returns the message if the calls of the step, of all models in one order, differ between ranks."""
        difference: str = next(iter(self._every.values())).difference(store, moment)
        return difference


class Teacher:
    """A model that is the average of another one (the student), in an engine that trains nothing. The student's engine
    keeps the average with its optimizer state, in fp32 and sharded; this is a copy of it."""

    def __init__(self, of: AverageOf, engine: ModelEngine, student: nn.Module, teacher: nn.Module) -> None:
        """``engine``: the student's."""
        self.of = of
        self._engine, self._student, self._teacher = engine, student, teacher
        engine.begin_average()

    def follow(self, update: int) -> None:
        """**Collective.** Called after the student's ``update``, counted from 1. Raises TaskError."""
        self._engine.average(self.of.momentum_at(update))
        self.take_over()

    def resume(self) -> None:
        """**Collective.** Called after the student's state has been read."""
        self._engine.begin_average()
        self.take_over()

    @torch.no_grad()
    def take_over(self) -> None:
        """**Collective.** Copies the averages (at first the weights) and the student's buffers to the teacher."""
        with self._engine.averaged():
            pairs = zip(self._teacher.parameters(), self._student.parameters(), strict=True)
            for parameter, average in pairs:
                self._engine.copy_shard(parameter, average)
        for buffer, current in zip(self._teacher.buffers(), self._student.buffers(), strict=True):
            put(current, buffer)
        extra_state.load(self._teacher, extra_state.pack(self._student))

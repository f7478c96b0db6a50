"""Models that are the average of another one, where several models have an engine each (:mod:`dsframe.engines.parts`).

The average is kept by the engine of the model that is averaged, beside the optimizer's state: in fp32, in that engine's shards, and
in checkpoints. After each update it is copied into the teacher's own engine, shard by shard.
"""

from __future__ import annotations

import torch
from torch import nn

from dsframe.engines.base import ModelEngine
from dsframe.model import extra_state
from dsframe.model.persistent import put
from dsframe.tasks.average_of import AverageOf


class Teacher:
    """One such model, in an engine that trains nothing."""

    def __init__(self, of: AverageOf, engine: ModelEngine, student: nn.Module, teacher: nn.Module) -> None:
        """``engine``: the student's."""
        self.of = of
        self._engine, self._student, self._teacher = engine, student, teacher
        engine.begin_average()

    def follow(self, update: int) -> None:
        """**Collective.** After the student's update of this number, from 1. Raises TaskError."""
        self._engine.average(self.of.momentum_at(update))
        self.take_over()

    def resume(self) -> None:
        """**Collective.** After the student's state has been read."""
        self._engine.begin_average()
        self.take_over()

    @torch.no_grad()
    def take_over(self) -> None:
        """**Collective.** Gives the teacher the averages; the student's weights where it has none. Buffers are the student's."""
        with self._engine.averaged():
            pairs = zip(self._teacher.parameters(), self._student.parameters(), strict=True)
            for parameter, average in pairs:
                self._engine.copy_shard(parameter, average)
        for buffer, current in zip(self._teacher.buffers(), self._student.buffers(), strict=True):
            put(current, buffer)
        extra_state.load(self._teacher, extra_state.pack(self._student))

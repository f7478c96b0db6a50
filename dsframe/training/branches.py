"""Rows that depend on each other only later: a block as often as the hardest row needs it, an early exit, a limit that few reach.

A few samples of the first step do not show it. But such a forward pass takes different ways, of different numbers of operations,
and autograd counts these anyway. So where the count is another one than before, the samples of that micro-batch are compared with
two halves of them. Ranks agree on it in steps that log, further and further apart.
"""

from __future__ import annotations

import torch

from dsframe.cluster.exchange import all_gather_text
from dsframe.data import Loader
from dsframe.engine import Engine
from dsframe.training import sample_trial

_APART = 4
"""The steps between two agreements are a part of those before."""


class Branches:
    """Counts the operations of the first micro-batch of each step on this rank."""

    def __init__(self, engine: Engine, loader: Loader) -> None:
        self._engine, self._loader = engine, loader
        self.looks = False
        """The same on all ranks."""
        self.said = False
        """True on a rank that has said it."""
        self._is_due, self._next, self._begun = False, 1, 0
        self._seen, self._looked = set[int](), set[int]()
        """Numbers of operations: of all steps, and of those that were looked at."""
        self._step = self._count = 0
        """The last step that is to be looked at, if any, and its number of operations."""

    def begin_step(self, steps_since: int, *, logs: bool) -> None:
        """As of :class:`LossTrial`."""
        self._is_due = self.looks and logs and steps_since >= self._next
        if self._is_due:
            self._next = steps_since + max(1, steps_since // _APART)

    def begin(self) -> None:
        """Before the forward pass of the first micro-batch."""
        self._begun = torch._C._autograd._get_sequence_nr()

    def end(self) -> None:
        """After it."""
        count = torch._C._autograd._get_sequence_nr() - self._begun
        self._seen.add(count)
        if len(self._seen) > 1 and count not in self._looked:
            self._step, self._count = self._engine.plan.task.context.step, count

    def judge(self) -> str:
        """**Collective.** After the step. Returns what is to be said, or nothing."""
        if not self._is_due:
            return ""
        steps = [int(text) for text in all_gather_text(self._engine, str(self._step))]
        if not any(steps):
            return ""
        kind = sample_trial.kind_of_step(self._engine, self._loader, (self._step or max(steps)) - 1)
        self._looked.add(self._count)
        self._step = 0
        self.looks = "neither" not in all_gather_text(self._engine, kind)
        return "" if self.looks or self.said else sample_trial.ROWS_DEPEND

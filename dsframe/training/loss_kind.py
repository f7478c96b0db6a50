"""Detects whether a task's loss is a mean over the samples of a micro-batch, a sum over them, or neither.

Engines average over micro-batches and ranks, which equals the loss of the global batch only if each loss is a mean;
gradients of a sum would silently depend on the number of ranks. So the loss of the first micro-batch is compared with
those of its two halves, from the same outputs. If outputs have no rows, or the task has a ``collate``, a few samples
are compared instead (:mod:`sample_trial`).

A mean over a quantity that these rows happen to share, such as the number of labels that count, shows only later. So
the comparison is repeated in the first steps that log, then at growing intervals.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dsframe.cluster.exchange import all_gather_json, all_gather_text, any_rank
from dsframe.data import Loader
from dsframe.data.datasets import StreamSource
from dsframe.engine import Engine
from dsframe.errors import TaskError
from dsframe.host import generators
from dsframe.model import derivatives
from dsframe.model.micro_batch import MicroBatch
from dsframe.tasks.task import Sum, Sums, gives
from dsframe.training import halves, restore, sample_trial, user_values
from dsframe.training.module_state import ModuleState
from dsframe.training.shared_buffers import but_statistics
from dsframe.values import tensors_of

_KINDS = ("mean", "sum", "neither")
_EARLY_TESTS = 8
"""Number of steps after the first in which every step that logs is tested; then the interval doubles."""


class Branches:
    """Detects rows that depend on each other only later: a block repeated for the hardest row, an early exit, a limit.
    If the number of operations in a forward pass changes, and in some early steps, a micro-batch is tested."""

    def __init__(self, engine: Engine, loader: Loader) -> None:
        self._engine, self._loader = engine, loader
        self.looks = self.said = self._is_due = self._is_early = False
        self._now, self._next, self._begun, self._share = 0, 1, 0, 0
        self._seen, self._untested = set[int](), dict[int, list[int]]()
        """Numbers of autograd operations seen; of those not yet tested: whether new, step and micro-batch."""
        self._is_stream = isinstance(loader.source, StreamSource)
        self._batch: Any = None
        self._newest: Any = None
        """Of a stream: the current micro-batch, and the one of the newest number of operations."""

    def begin_step(self, steps_since: int, *, logs: bool) -> None:
        """Called before a step, like :meth:`LossTrial.begin_step`. One process asks no other rank, and tests at once."""
        doubles = steps_since & (steps_since - 1) == 0
        self._now, self._is_early = steps_since, steps_since in (1, 4)
        asks = logs or doubles or self._engine.plan.world.size == 1
        self._is_due = self.looks and asks and steps_since >= self._next

    def begin(self, batch: MicroBatch, index: int) -> None:
        """Called before the forward pass of this rank's micro-batch ``index`` of the step."""
        plan = self._engine.plan
        self._share = index * plan.batch.data_parallel_size + plan.data_rank
        self._batch = (batch.inputs, batch.targets) if self._is_stream else None
        self._begun = torch._C._autograd._get_sequence_nr()  # no public name in torch

    def end(self) -> None:
        """Called after that forward pass."""
        count = torch._C._autograd._get_sequence_nr() - self._begun
        is_new = count not in self._seen
        if self._is_early or is_new:
            self._seen.add(count)
            self._untested[count] = [is_new, self._engine.plan.task.context.step, self._share]
            self._newest = self._batch

    def judge(self) -> str:
        """**Collective.** Returns a message after a step, or ""."""
        asks, is_single = bool(self._untested), self._engine.plan.world.size == 1
        asks &= self._is_early or len(self._seen) > 1
        if not self._is_due or not (asks if is_single else any_rank(self._engine, asks)):
            return ""
        newest = sorted([*place, count] for count, place in self._untested.items())[-1:]
        _, step, share, count = max(entry for entries in all_gather_json(self._engine, newest) for entry in entries)
        self._untested.pop(count, None)
        self._seen.add(count)
        self._next = self._now + max(1, self._now // 4)
        given, self._newest = self._newest or self._batch, None
        kind, _ = sample_trial.kind_of(self._engine, self._loader, step - 1, share, training=True, given=given)
        self.looks = "neither" not in all_gather_text(self._engine, kind)
        by_loss = not self.looks and derivatives.line_of(self._engine.plan.task, nn.Module())
        line = sample_trial.NEITHER if by_loss else sample_trial.ROWS_DEPEND
        return "" if self.looks or self.said else line


class LossTrial:
    """Tests one micro-batch of this rank and combines the result with the other ranks'."""

    def __init__(self, engine: Engine, loader: Loader) -> None:
        self._engine, self._loader = engine, loader
        self._votes = Counter[str]()
        self._state = set[str]()
        self._weights = dict[str, str]()
        """Weights of modules in the task outside the model that the loss has changed, with digests."""
        self._buffers = set[str]()
        """Buffers of the model that the loss has changed."""
        self._moves = self._uneven = False
        """True if the same loss, with equal inputs and random numbers, changed when repeated on this rank."""
        self._neither = False
        """True if the loss was reported to be neither a mean nor a sum over rows."""
        self._tests_again = self._is_due = False
        """The same on all ranks."""
        self._is_first, self._next_test = True, 1
        self._batch: Any = None
        self._others: user_values.Generators | None = None
        self._held: restore.HeldBuffers | None = None
        """The task's buffers from before the first step, during that step."""
        self._before_hooks: restore.HeldBuffers | None = None
        """The same buffers, after the first step."""
        self.draws = False
        """True if the loss drew from one of torch's generators on this rank."""
        self.draws_others = self.draws_own = False
        """True if a generator of NumPy, Python, task or model moved in this rank's step; of task or model."""
        self.draws_later = False
        """True if the process's generators, or held ones, moved in a later step of this rank."""
        self.knows_draws = self._asks_draws = False
        self._drawn: dict[str, Any] = {}
        self.of_model = ModuleState(engine)
        self.branches = Branches(engine, loader)
        # With sequence parallelism a task has to return the mean over its slice's positions.
        self._can_test = engine.plan.batch.sequence_parallel_size == 1

    def begin_step(self, steps_since: int, *, logs: bool) -> None:
        """Called before a step. ``steps_since``: steps after the first. ``logs``: the step logs, and waits for the
        device anyway."""
        self._is_first = steps_since == 0
        self._asks_draws = not self.knows_draws and steps_since & (steps_since - 1) == 0 < steps_since
        self.branches.begin_step(steps_since, logs=logs)
        self._is_due = self._tests_again and logs and steps_since >= self._next_test
        if self._is_due:
            self._next_test = steps_since + max(1, steps_since - _EARLY_TESTS)
            self._votes.clear()

    def watched(self, batch: MicroBatch, index: int) -> MicroBatch:
        """Returns micro-batch ``index`` of a step, with a loss inspection attached if one is due."""
        self.branches.begin(batch, index)
        if self._asks_draws and index + 1 == self._engine.plan.batch.accumulation_steps:
            self._others = user_values.Generators(self._engine)
            self._drawn = generators.capture(self._engine.plan.device)
        if index or not self._is_first:
            self.of_model.backward_ended()
            return replace(batch, inspect=self._inspect_again) if self._is_due or self.branches.looks else batch
        self._others = user_values.Generators(self._engine)
        self._held = restore.HeldBuffers(self._engine)
        self._batch = batch.inputs, batch.targets
        self.of_model.begin(batch)
        return replace(batch, inspect=self._inspect) if self._can_test else batch

    def judge_again(self) -> str:
        """**Collective.** Does the same as :meth:`judge` after a later step."""
        task, tally = self._engine.plan.task, self._tally() if self._is_due else {}
        kind = next((kind for kind in reversed(_KINDS) if kind != task.loss_is and tally.get(kind)), "")
        self._tests_again &= not kind
        if kind in ("", "neither"):
            return sample_trial.NEITHER if kind else ""
        other = f"a {task.loss_is} over rows at first, and a {kind} in step {task.context.step}"
        return f"loss is {other}, {sample_trial.DEPENDS}"

    def step_ended(self) -> None:
        """Called directly after each step, before hooks and loggers, which may draw random numbers."""
        if self._drawn and self._others is not None:
            self.draws_later = self._others.changed() or self._drawn != generators.capture(self._engine.plan.device)
            self._drawn = {}
        if self._held is not None and self._others is not None:
            self.of_model.step_ended()
            self.draws_others = self._others.changed()
            self.draws_own = self._others.held_changed()
            self._weights = self._held.changed_weights()
            self._state |= self._held.changed()  # a change may happen only with gradients on
            self._held, self._before_hooks = None, self._held

    def changed_by_hooks(self) -> set[str]:
        """Called after the first step's hooks. Returns the attributes, and weights of task modules, that they
        changed."""
        held, self._before_hooks = self._before_hooks, None
        return self.of_model.changed_by_hooks() | (
            held.changed_weights().keys() - self._weights.keys() if held else set()
        )

    def judge(self, differing: Collection[str], *, resumed: bool) -> str:
        """**Collective.** Returns a message, or "". ``differing``: buffers of the model that differ between ranks.
        Raises TaskError if the task declares another kind of loss, or if the loss has a state that ranks, or a
        ``resumed`` run, would not share."""
        engine, task = self._engine, self._engine.plan.task
        self._state |= {name for name in self._buffers.intersection(differing) if but_statistics(engine, [name])}
        verdict = self._judge_state(resumed=resumed)
        tally = self._tally()
        kind, why = halves.agreed([kind for kind in _KINDS if tally[kind]]), ""
        if task.gathers_rows:
            return verdict  # the test saw only one rank's rows, while the loss covers the global batch
        is_needed = self._can_test and sample_trial.is_needed(engine, self._loader, kind)
        few_rows = self._can_test and sample_trial.has_few_rows(engine)
        of_halves = kind
        if is_needed or few_rows:
            seen = all_gather_text(
                engine, halves.UNEVEN if self._uneven else "neither" if self._votes["neither"] else ""
            )
            rank = seen.index("neither") if "neither" in seen else None
            if halves.UNEVEN not in seen:  # values of samples do not show it
                kind, why = sample_trial.kind_of(engine, self._loader, task.context.step - 1, rank)
            if not kind and not is_needed:
                kind, why = of_halves, ""
        self._neither = kind == "neither"
        if self._neither:
            line = why if why and of_halves != "neither" else sample_trial.NEITHER
            return verdict if task.batch_dependent else verdict or line
        has_rows = of_halves in ("mean", "sum")
        is_declared = kind in ("", task.loss_is)
        self._tests_again = self._can_test and has_rows and is_declared and not (task.batch_dependent or tally["draws"])
        if is_declared:
            return verdict or why
        whose = type(task).__name__
        if task.loss_is == "sum":
            raise TaskError(
                f'{whose}.loss gives a mean over the rows of a micro-batch, but the task says loss_is = "sum"; '
                "leave loss_is out, or return the sum"
            )
        batch = engine.plan.batch
        count = batch.accumulation_steps * batch.data_parallel_size
        if count == 1:
            return 'loss is a sum over rows: with more ranks or accumulation the task needs loss_is = "sum"'
        raise TaskError(
            f"{whose}.loss gives a sum over the rows of a micro-batch. A step takes the mean over its {count} micro-batches, so "
            f'gradients would be 1/{count} of those of the whole batch; write loss_is = "sum" in class {whose}, or return the mean '
            "(a mean over chosen rows, such as the hardest, needs the rows of all ranks: self.all_rows)"
        )

    def look_at_samples(self, differing: Collection[str], *, resumed: bool) -> str:
        """**Collective.** Does the same as :func:`sample_trial.refuse_other_numbers`. ``differing``: as for
        :meth:`judge`."""
        engine, batch, self._batch = self._engine, self._batch, None
        parted = not getattr(engine, "averages_gradients", True)  # the weights of ranks differ temporarily
        if parted or not self._can_test or engine.plan.task.gathers_rows:
            return ""
        alike = not but_statistics(engine, differing)
        line = sample_trial.refuse_other_numbers(engine, self._loader, batch, buffers_alike=alike, resumed=resumed)
        self.branches.said = line == sample_trial.ROWS_DEPEND
        self._tests_again &= line != sample_trial.NEITHER
        self.branches.looks = not (self._neither or self._loader.collate_draws or sample_trial.mixes_rows(engine))
        return "" if self._neither and line in (sample_trial.ROWS_DEPEND, sample_trial.NEITHER) else line

    def _tally(self) -> dict[str, float]:
        """**Collective.** Returns how often each kind was seen, and on how many ranks the loss draws."""
        local = [*(float(self._votes[kind]) for kind in _KINDS), float(self.draws or self.draws_others)]
        counts = self._engine.sum_over_ranks(torch.tensor(local, dtype=torch.float64).to(self._engine.plan.device))
        return dict(zip((*_KINDS, "draws"), counts.tolist(), strict=True))

    def _judge_state(self, *, resumed: bool) -> str:
        whose, world = type(self._engine.plan.task).__name__, self._engine.plan.world
        state = {name for names in all_gather_json(self._engine, sorted(self._state)) for name in names}
        if "moves" in set(all_gather_text(self._engine, "moves" if self._moves else "")):
            state.add("a value outside of the attributes (in an object of a global, for example)")
        weights = all_gather_text(self._engine, json.dumps(self._weights, sort_keys=True))
        if resumed or len(set(weights)) > 1:  # a change that is the same on all ranks is lost only by resuming
            state |= {name for text in weights for name in json.loads(text)}
        names = ", ".join(sorted(state | self._weights.keys()))
        if state and (resumed or world.size > 1):
            why = "a resumed run would begin with another" if resumed else "each rank would have its own"
            raise TaskError(
                f"{whose}.loss changes {names}, a state that the task keeps: {why}, and no checkpoint has it. Keep it as a buffer "
                "of a module that model() returns, and make it from the rows of all ranks (dsframe.tasks.global_batch.all_rows)"
            )
        return f"loss changes {names} of the task, which no checkpoint has" if names else ""

    @torch.no_grad()
    def _inspect_again(self, outputs: Any, targets: Any) -> None:
        self.branches.end()
        if not self._is_due:
            return
        kept = restore.Kept(self._engine)
        with suppress(Exception), self._engine.plan.task.context.evaluation():
            task = restore.twin(self._engine.plan.task)
            self._votes[halves.kind_of(task, outputs, targets).partition(",")[0]] += 1
        kept.put_back()

    @torch.no_grad()
    def _inspect(self, outputs: Any, targets: Any) -> None:
        self.branches.end()
        self.of_model.forward_ended()
        if any(isinstance(leaf, Iterator) for leaf in tree_leaves((outputs, targets))):
            return  # the test would consume it
        task = self._engine.plan.task
        kept, copied = restore.Kept(self._engine), restore.twin(task)
        with task.context.evaluation():
            try:
                again = []
                for _ in range(2):
                    kept.put_back()
                    part = slice(0, halves.rows_of(outputs, targets) or None)
                    again.append(float(halves.computed(restore.twin(task), (outputs, targets), part)[0]))
                self._moves = abs(again[1] - again[0]) > halves.TOLERANCE * abs(again[0])
                kept.put_back()
                kind = halves.kind_of(copied, outputs, targets)
            except Exception:
                kind = ""  # a loss for only this number of rows; training reports errors
        self._state |= kept.buffers.changed()
        self._buffers = kept.buffers.changed(of_model=True)
        self.draws = kept.drew
        kept.put_back()
        self._uneven = kind == halves.UNEVEN
        self._votes[kind.partition(",")[0]] += 1
        state, numbers = restore.changes(task, copied)
        self.of_model.of_task |= numbers
        (self.of_model.of_task if self.of_model.sees_loss else self._state).update(state)


def unequal_metrics(engine: Engine, measure: Callable[[Any, Any], Sums], outputs: Any, targets: Any) -> list[str]:
    """Returns the metrics of a batch whose mean differs from that over two unequal parts of it, and whose total is not
    the parts' total, if the task takes totals. Returns [] if tensors differ in their number of rows, or if a metric
    does not accept another number of rows."""
    context, seen = engine.plan.task.context, list[Sums]()
    samples = context.eval_samples
    if samples < 2 or {len(leaf) for leaf in tensors_of((outputs, targets)) if leaf.ndim} != {samples}:
        return []
    try:
        for part in (slice(0, samples), slice(0, (samples + 3) // 4), slice((samples + 3) // 4, samples)):
            context.eval_samples = part.stop - part.start
            with restore.task_unmoved(engine):
                seen.append(measure(*tree_map_only(Tensor, partial(halves.rows_in, part), (outputs, targets))))
    except Exception:
        return []
    finally:
        context.eval_samples = samples
    names, near = [], partial(np.isclose, rtol=1e-3, equal_nan=True)
    for name, whole in seen[0].items():
        parts = sum((sums[name] for sums in seen[1:] if name in sums), Sum(0.0 * whole.total, 0))
        is_total = gives(engine.plan.task, "finalize") and near(float(whole.total), float(parts.total))
        names += [] if is_total or near(whole.mean, parts.mean) else [name]
    return names

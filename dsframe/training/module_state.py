"""Detects state that a model keeps between forward passes in plain attributes (``self.h = h.detach()``), or a loss in
the task.

No checkpoint contains it, and each rank has its own. Caches, counters and values for a log do no harm. So if attributes
change in the first step, its loss is computed with their values from before and after: if it differs, training depends
on them. With several micro-batches a step, saved buffers are tested too: a count of forward passes, the vectors of a
spectral norm.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm

from dsframe.cluster.exchange import all_gather_json
from dsframe.engine import Engine
from dsframe.errors import EngineError, TaskError, WorldError
from dsframe.host import generators
from dsframe.model import extra_state, metric_objects
from dsframe.model.micro_batch import MicroBatch
from dsframe.model.persistent import persistent_buffers
from dsframe.model.user_spaces import Space, hooks_of
from dsframe.model.user_state import words_of
from dsframe.training import restore, sample_trial, user_values
from dsframe.training.shared_buffers import but_statistics
from dsframe.training.user_values import Values
from dsframe.values import ELEMENTS, same

_TOLERANCE = 1e-6
"""Relative. At least ten times the difference between two equal evaluations is allowed as well."""
_NAMED = 4
"""Maximum number of names in a message; a quantised network has as many buffers as layers."""
_LOSS, _BUFFERS, _EVALUATION = "loss depends", "buffers depend", "evaluation depends"
_NO, _UNKNOWN = "no", "unknown"


class ModuleState:
    """Tests one micro-batch of this rank and combines the result with the other ranks'."""

    def __init__(self, engine: Engine) -> None:
        batch = engine.plan.batch
        self._engine = engine
        self.sees_loss = batch.data_parallel_size == engine.plan.world.size
        """False if ranks split a model, because only one of them would see the loss."""
        self._batch: tuple[Any, Any] | None = None
        self._before: tuple[Values, Values] | None = None
        """Attributes of the model's modules, and values that user code keeps outside them and the task."""
        self._of_gradients: Values | None = None
        """Values of hooks on gradients, which an engine may call after the last micro-batch."""
        self._buffers: restore.Buffers | None = None
        """Buffers from before the step: what the first micro-batch leaves in them may hide a change by the next one."""
        self._buffers_after: restore.Buffers | None = None
        """Buffers from after the step, if they are to be tested."""
        self._extra_before, self._extra_after = dict[str, Tensor](), dict[str, Tensor]()
        self._alike: dict[str, Tensor] = {}
        """Extra states of modules before and after the step; of the latter, those that are the same on all ranks."""
        self._after: tuple[Values, Values] | None = None
        self._changed, self._outside = set[str](), set[str]()
        self._task_before = self._task_after = restore.twin(engine.plan.task)
        self._at_loss: tuple[Values | restore.Buffers, ...] = ()
        self._in_backward, self._in_update = set[str](), set[str]()
        """Names of values of model or program that the first micro-batch's loss or backward pass has changed."""
        self.of_task = set[str]()
        """Attributes of the task that its loss has changed on this rank."""
        self._later: tuple[Values, ...] = ()
        self._structure = dict[str, Any]()
        self._rebuilt, self._modes = set[str](), set[str]()
        """Identity, mode and hooks of modules at the last test; what the first step, and its forward pass, changed."""

    def begin(self, batch: MicroBatch) -> None:
        """Called before the first micro-batch."""
        watch = self._engine.built.watch
        self._task_before = restore.twin(self._engine.plan.task)
        if watch is not None:
            self._batch, self._before = (batch.inputs, batch.targets), self._values()
            self._of_gradients = user_values.outside(self._engine, of_gradients=True)
            self._structure = _structure(self._modules())
            self._extra_before = extra_state.pack(watch.model)
            self._buffers = restore.Buffers(watch.model.named_modules(), most_elements=ELEMENTS)

    def forward_ended(self) -> None:
        """Called after the forward pass of the first micro-batch."""
        self._at_loss = (*self._values(), restore.Buffers(self._modules().named_modules(), most_elements=ELEMENTS))
        changed = _changed_keys(self._structure, _structure(self._modules()))
        self._modes = {name for name in changed if name.endswith(".training")}

    def backward_ended(self) -> None:
        """Called after the backward pass of the first micro-batch, or later in the step."""
        self._in_backward.update(*(values.changed() for values in self._at_loss))
        self._at_loss = ()

    def step_ended(self) -> None:
        """Called directly after the step, before hooks, which may set attributes."""
        self.backward_ended()
        watch, task = self._engine.built.watch, self._engine.plan.task
        self.of_task = self.of_task.union(*restore.changes(self._task_before, task))
        update = getattr(inspect.unwrap(task.after_step), "__code__", None)  # an object with __call__ has none
        self._in_update = self.of_task & words_of(update) if update else self.of_task
        self._task_after = restore.twin(task)
        if watch is not None and self._before is not None:
            self._changed, self._outside = (values.changed() for values in self._before)
            self._in_backward |= self._of_gradients.changed() if self._of_gradients else set()
            self._after = self._values()
            before, self._structure = self._structure, _structure(self._modules())
            self._rebuilt = _changed_keys(before, self._structure) & before.keys()
            self._extra_after = extra_state.pack(watch.model)
            self._changed |= {
                name for name, packed in self._extra_after.items() if not same(packed, self._extra_before.get(name))
            }
            if self._engine.plan.batch.accumulation_steps > 1 and not task.batch_dependent:
                self._buffers_after = restore.Buffers(watch.model.named_modules(), most_elements=ELEMENTS)

    def changed_by_hooks(self) -> set[str]:
        """Returns what has changed since the end of the step: attributes of task and model, values elsewhere in their
        code, and modules with their modes and the user's hooks."""
        task = self._engine.plan.task
        loss = inspect.unwrap(type(task).loss)
        loss_names = words_of(loss.__code__) if inspect.isfunction(loss) else frozenset[str]()
        of_loss = Values([Space(vars(task), loss_names, "{}")], lambda value: isinstance(value, (int, float, str)))
        of_task = restore.changes(self._task_after, task)
        changed = set[str]().union(*of_task, *(values.changed() for values in self._after or ()))
        before, self._structure = self._structure, _structure(self._modules())
        self._later = (*(values.small() for values in self._after or ()), of_loss)
        return (changed | (_changed_keys(before, self._structure) if before else set())) - {"hooks"}

    def changed_later(self) -> set[str]:
        """Returns, once, values read by loss or model that have changed since the first step, and replaced parts. Omits
        the state of the task's torchmetrics objects: only evaluations may call them."""
        if not self._later:
            return set()
        changed = _changed_keys(self._structure, _structure(self._modules())).union(
            *(values.changed() for values in self._later)
        )
        changed |= self._rebuilt
        modules = dict(self._modules().named_modules())
        metrics = {name for name in changed if metric_objects.is_metric(modules.get(name.rpartition(".")[0]))}
        changed -= self.of_task | self._changed | self._outside | self._modes | metrics
        self._later = () if changed else self._later
        return changed

    def _modules(self) -> nn.Module:
        """Returns a module with the model (as "") and the modules of the task, by attribute name."""
        watch, every = self._engine.built.watch, nn.Module()
        of_task = user_values.modules_of(self._engine.plan.task)._modules
        every._modules.update({"": watch.model} if watch else {}, **of_task)
        return every

    def _values(self) -> tuple[Values, Values]:
        return user_values.attributes(self._modules(), buffers=True), user_values.outside(self._engine)

    def judge(self, differing: Collection[str], *, resumed: bool) -> str:
        """**Collective.** Returns a message, or "". ``differing``: the buffers and extra states that differ between ranks.
        Raises TaskError if the model has a state that ranks, or a ``resumed`` run, would not share."""
        lines = []
        # A resumed run, or one with another number of ranks, starts with values that are equal on all ranks.
        self._alike = {name: packed for name, packed in self._extra_after.items() if name not in differing}
        kinds = {
            "model": self._changed - self._alike.keys(),
            "task": self.of_task,
            "program": self._outside,
            "buffers": self._moved_buffers(),
        }
        changed = {whose: self._union_over_ranks(names) for whose, names in kinds.items()}
        depending = {
            whose: self._union_over_ranks({self._depends(whose, names)}) for whose, names in changed.items() if names
        }
        self._batch = self._before = self._after = self._buffers = self._buffers_after = None
        for whose, depends in depending.items():
            call = "forward pass" if whose == "model" else "loss"
            names = shortened(sorted(changed[whose]))
            if whose == "buffers":
                if _LOSS in depends or self._has_spectral_norm(changed[whose]):
                    lines.append(
                        f"model's loss depends on {names}, which each forward pass changes, so the training depends on "
                        "gradient_accumulation_steps (batch_dependent = True in the task says that it is meant)"
                    )
                elif _UNKNOWN in depends:
                    lines.append(f"model's backward pass changes {names}; its gradients may depend on them")
            elif kind := next((kind for kind in (_LOSS, _BUFFERS, _EVALUATION) if kind in depends), ""):
                of_program = "globals, classes or closures from one step"
                where = of_program if whose == "program" else f"attributes from one {call}"
                text = f"{whose} keeps values in {where} to the next, and its {kind} on them ({names})"
                if resumed or (kind != _BUFFERS and self._engine.plan.world.size > 1):
                    extra = {name.rpartition(".")[0] for name in self._extra_after}  # it saves its module's attributes
                    saved = all(name.rpartition(".")[0] in extra for name in changed[whose])
                    lost = "" if saved else "no checkpoint has them, and "
                    raise TaskError(
                        f"this {text}: {lost}each rank keeps its own. Make them persistent buffers of the "
                        "model (self.register_buffer), the same on all ranks (dsframe.tasks.global_batch.all_rows), or a part of "
                        "the inputs; the number of the step is self.context.step in the task"
                    )
                lines.append(f"{text}; no checkpoint has them")
            elif _UNKNOWN in depends:
                what, that = "values" if whose == "program" else "attributes", "loss depends"
                if not changed[whose].isdisjoint(self._in_backward):
                    call, that = "backward pass", "gradients depend"
                if not changed[whose].isdisjoint(self._in_update):
                    call, that = "after_step", "updates depend"
                lines.append(
                    f"{whose} changes {what} in its {call} ({names}); whether its {that} on them was not examined"
                )
        return ". This ".join(lines)

    def _moved_buffers(self) -> set[str]:
        """Returns the saved buffers that this rank's forward passes have changed, without statistics."""
        watch = self._engine.built.watch
        if watch is None or self._buffers is None or self._buffers_after is None:
            return set()
        saved = persistent_buffers(watch.model)
        extra = self._changed & self._extra_after.keys()
        return extra | {name for name in self._buffers.changed() & saved.keys() if but_statistics(self._engine, [name])}

    def _has_spectral_norm(self, buffers: Collection[str]) -> bool:
        """Returns True for the vectors of a spectral norm, which follow a weight by one iteration in each forward pass.
        They start without lag (torch 2.13, ``nn/utils/parametrizations.py``), so the first step's loss does not show
        it."""
        watch = self._engine.built.watch
        modules = dict(watch.model.named_modules()) if watch else {}
        return any(isinstance(modules.get(name.rpartition(".")[0]), _SpectralNorm) for name in buffers)

    def _union_over_ranks(self, names: set[str]) -> set[str]:
        return {name for of_rank in all_gather_json(self._engine, sorted(names)) for name in of_rank}

    def _depends(self, whose: str, names: Collection[str]) -> str:
        """**Collective.** Returns whether this rank's loss, buffers after the forward pass, or evaluation differ
        between the values from before and after the step. ``whose``: values of the model's modules, the task
        (``names``), buffers, or the program."""
        if not self.sees_loss:
            return _UNKNOWN
        kind, carried = self._compared(whose, names, in_training=True)
        watch, unseen = self._engine.built.watch, self._in_backward | self._in_update
        in_evaluation = self._compared(whose, names, in_training=False)[0]  # collective, whatever the first result was
        is_unseen = not unseen.isdisjoint(names) or (watch is not None and watch.has_writes)
        if (kind == _NO or (kind, whose) == (_BUFFERS, "buffers")) and is_unseen:
            return _UNKNOWN  # gradients may depend on it, updates, or what a pass in training mode writes
        return _EVALUATION if kind == _NO and carried and in_evaluation == _LOSS else kind

    def _compared(self, whose: str, names: Collection[str], *, in_training: bool) -> tuple[str, bool]:
        """**Collective.** Returns the same for one mode without evaluation, and whether values after a forward pass
        depend on those before it, so that a resumed run would lack them."""
        engine, watch, device = self._engine, self._engine.built.watch, self._engine.plan.device
        attributes = vars(engine.plan.task)
        now = dict(attributes)
        buffers = self._buffers
        if watch is None or self._batch is None or self._before is None or self._after is None or buffers is None:
            return _NO, False
        kept = generators.capture(device)
        losses = sample_trial.Losses(engine)
        contents: list[dict[str, Tensor]] = []
        # Some values matter only in training.
        models = list(watch.model.children()) if engine.built.losses else [watch.model]
        mode = sample_trial.training_mode(models, watch) if in_training else nullcontext()
        left: Values | None = None
        changed: list[set[str]] = []
        try:
            with restore.unmoved(engine, watch.model), engine.plan.task.context.evaluation(), mode:
                for after in (False, True, False):
                    generators.restore(kept, device)
                    after_step = after and whose == "buffers" and self._buffers_after
                    (after_step or buffers).put_back()
                    of_modules, outside = self._after if after else self._before
                    if whose == "model":
                        of_modules.put_back()
                    if whose in ("model", "buffers"):
                        shared = self._alike if whose == "model" else {}
                        extra_state.load(watch.model, self._extra_after if after else self._extra_before | shared)
                    elif whose == "program":
                        outside.put_back()
                    values = vars(self._task_after if after else self._task_before)
                    for name in names if whose == "task" else ():
                        attributes.pop(name, None)
                        if name in values:
                            attributes[name] = values[name]
                    with watch.trial():
                        losses.add(self._batch, samples=1)
                    contents.append(buffers.contents())
                    left = left or self._values()[whose == "program"]
                    changed.append(left.changed())
        except (EngineError, WorldError):
            raise
        except Exception:  # for example a model whose outputs in evaluation mode do not fit the loss
            return _UNKNOWN, False
        finally:
            attributes.clear()
            attributes.update(now)
        alike = all(
            abs(after - before) <= max(_TOLERANCE * abs(before), 10 * abs(again - before))
            for before, after, again in losses.of.values()
        )
        carried = changed[1] != changed[2]
        if not alike:
            return _LOSS, carried
        first, second, third = contents
        saved = persistent_buffers(watch.model)  # others are attributes, which the loss was tested for
        moved = (name for name in saved.keys() & first if not same(first[name], second.get(name)))
        return _BUFFERS if any(same(first[name], third.get(name)) for name in moved) else _NO, carried


def _structure(every: nn.Module) -> dict[str, Any]:
    """Returns the structure of modules, without values: identity, mode, the user's hooks, and an own ``forward``."""
    structure = dict[str, Any]()
    for name, module in [*every.named_modules()][1:]:
        identity = (module, vars(module).get("forward"))
        structure |= {name or "model": identity, f"{name}.training": module.training}
        structure[f"hooks of {name or 'model'}"] = hooks_of(module)
    return structure


def _changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    return {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def shortened(names: list[str]) -> str:
    """Returns the first names and the number of the others."""
    return ", ".join(names) if len(names) <= _NAMED else f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"

"""Several models of one task, each with its own engine: GANs, distillation, a policy and its reference.

All engines are of the run's type. Each trains a module with its model under its name; the module's forward pass is the
loss that trains the model. A library that wraps, gathers or reduces therefore sees one forward and one backward pass of
one module. The loss asks the other models for outputs; meanwhile their parameters require no gradients. A step is one
step of each engine, in the order of the task's losses.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dsframe.checkpoint import changes
from dsframe.cluster import process_group
from dsframe.cluster.exchange import by_value, first_difference
from dsframe.data.sample_draws import DrawTrial
from dsframe.engine import Engine, StepResult
from dsframe.engines.base import ModelEngine
from dsframe.engines.part_models import Drawn, LossInputs, Part, Pass
from dsframe.engines.part_views import Calls, Draws, SavedPart, Teacher, config_of, groups_of, terms_of
from dsframe.errors import CheckpointError, TaskError
from dsframe.model import digests, extra_state, max_norm, optimizers, schedules
from dsframe.model.built import BuiltModel, ParameterGroups
from dsframe.model.built_memory import BuiltMemory
from dsframe.model.micro_batch import Arguments, Inputs, Measure, MicroBatch, Pair
from dsframe.model.persistent import persistent_buffers, put, saved_buffers
from dsframe.model.plan import Plan
from dsframe.model.state import EngineState, ParameterState, SavedState, ShardedParameters
from dsframe.model.weight_watch import WeightWatch
from dsframe.tasks.average_of import AverageOf
from dsframe.tasks.several import model_names
from dsframe.tasks.task import Sums, gives, loss_and_terms, sums
from dsframe.values import Tensors, trainable

Make = Callable[[Plan], ModelEngine]


class PartsEngine(Engine):
    """Wraps one engine for each model of a task."""

    def __init__(self, plan: Plan, engine: Make) -> None:
        """**Collective.** Raises TaskError if models and losses do not match, and the errors of each engine."""
        self.plan = plan
        every, self._losses = model_names(plan.task), plan.task.losses()
        self._passes = {name: Pass() for name in self._losses}
        self._digests: dict[str, str] = {}
        self._parts: dict[str, Part] = {}
        self._engines: dict[str, ModelEngine] = {}
        for name in plan.config.settings.optimizers:
            if name not in self._losses:
                known = ", ".join(self._losses)
                raise TaskError(
                    f"dsframe.optimizers: no loss trains a model {name!r}; those that are trained are {known}"
                )
        self._every = {name: optimizer.every_steps for name, optimizer in plan.config.settings.optimizers.items()}
        if all(self._every.get(name, 1) > 1 for name in self._losses):
            raise TaskError("dsframe.optimizers: each model has every_steps above 1, so some steps would train nothing")
        self._steps = 0
        with process_group.shared():
            for name in every:
                self._engines[name] = engine(self._plan_of(name))
        plan.task.context = replace(plan.task.context, ranks=weakref.proxy(self))
        self._trained = {name: trained_engine for name, trained_engine in self._engines.items() if name in self._losses}
        self._learning = {name: trainable(self._parts[name]) for name in self._trained}
        if difference := first_difference(
            self, [f"{name} with digest {digest}" for name, digest in self._digests.items()]
        ):
            raise TaskError(f"{type(plan.task).__name__}: a frozen model differs between ranks: {by_value(difference)}")
        self._teachers = {
            name: Teacher(of, self._engines[of.model], self._parts[of.model].inner, self._parts[name].inner)
            for name, of in self._averages.items()
        }
        if self._teachers and plan.config.settings.ema:
            raise TaskError(
                f"dsframe.ema: {type(plan.task).__name__} averages a model itself (average_of); remove one of them"
            )
        norms = (isinstance(module, _BatchNorm) for part in self._parts.values() for module in part.modules())
        if plan.config.settings.model.sync_batch_norm and not any(norms):
            raise TaskError('"sync_batch_norm" has no effect: no model has BatchNorm; remove it')
        self._set_built()

    @property
    def _averages(self) -> dict[str, AverageOf]:
        return {name: made for name, made in self.plan.task.models().items() if isinstance(made, AverageOf)}

    def _set_built(self) -> None:
        engines = self._engines.values()
        draws: Any = Draws([DrawTrial(module, self.plan.device) for module in self._passes.values()])
        trained = {name: engine.built.groups for name, engine in self._trained.items()}
        groups = ParameterGroups(
            asked={
                key: {name: group.asked.get(key) for name, group in trained.items()}
                for key in dict.fromkeys(key for group in trained.values() for key in group.asked)
            },
            lines=tuple(f"{name}, {line}" for name, group in trained.items() for line in group.lines),
        )
        called = {name: engine.built.calls for name, engine in self._engines.items() if engine.built.calls is not None}
        self._calls = Calls(called) if called else None
        specs = {name: engine.plan.optimizer for name, engine in self._trained.items()}
        how = {
            name: f"loss {number}, {changes.kind_of(specs[name])}" for number, name in enumerate(self._losses, start=1)
        }
        how |= {name: f"{how[name]}, every {every} steps" for name, every in self._every.items() if every > 1}
        how |= {name: f"frozen, digest {digest}" for name, digest in self._digests.items()}
        how |= {name: str(of) for name, of in self._averages.items()}
        manifest: dict[str, dict[str, Any]] = {
            "training": {"models": {name: how[name] for name in self._engines}},
            "course": {
                "optimizers": {name: changes.course_of(spec) for name, spec in specs.items()},
                "learning rate": {name: spec.learning_rate for name, spec in specs.items()},
                "modules": {name: engine.built.manifest["course"]["modules"] for name, engine in self._engines.items()},
                "attributes": {
                    key if key.startswith("task.") else f"{key}, {name}": value
                    for name, engine in self._engines.items()
                    for key, value in engine.built.manifest["course"]["attributes"].items()
                },
            },
        }
        descriptions = [f"{name} ({self._parts[name].size:,} parameters; {how[name]})" for name in self._engines]
        origins = [engine.built.origin for engine in engines if engine.built.origin]
        self.updates_in_place = self._first.updates_in_place
        self.explains = self._first.explains  # for the weight watch
        trained_parts = nn.Module()
        for name in self._trained:
            trained_parts.add_module(name, self._parts[name].inner)
        memory = BuiltMemory.together(engine.built.memory for engine in self._trained.values())
        self.built = BuiltModel(
            # Only between steps: each loss changes the weights of another model.
            watch=WeightWatch(self, trained_parts, memory, max_norm.written(trained_parts)),
            dtype=self._first.built.dtype,
            groups=groups,
            origin="; ".join([*origins, f"models: {', '.join(descriptions)}"]),
            depends=tuple(dependence for engine in engines for dependence in engine.built.depends),
            draws=draws,
            losses=self._losses_of,
            calls=self._calls,
            manifest=manifest,
        )
        assert self.built.watch is not None
        self.built.watch.note_parameters()  # before a forward pass replaces them

    @property
    def _first(self) -> ModelEngine:
        """The engine of the model that is evaluated."""
        return next(iter(self._trained.values()))

    # What each engine is made of.

    def _plan_of(self, name: str) -> Plan:
        plan, whole, others = self.plan, self.plan.task, self._losses.keys() - {name}
        task: Any = copy.copy(whole)
        task.model, task.loss = lambda: self._build(name), lambda outputs, targets: outputs
        task.parameter_groups = lambda model: groups_of(whole.parameter_groups(model), others)
        task.after_step = whole.after_step  # bound method: it sees the task's current attributes and context
        if name not in self._losses:
            task.parameter_groups = lambda model: ()
        config = config_of(plan.config, name, others, frozen=name not in self._losses)
        optimizer, schedule = plan.optimizer, plan.schedule
        if name in plan.config.settings.optimizers:
            optimizer = optimizers.of_task(optimizers.read(config), whole)
            optimizer = replace(optimizer, kept_outside=plan.optimizer.kept_outside)
            if plan.config.deepspeed.scheduler and plan.optimizer.learning_rate:
                schedule = schedules.scaled(schedule, optimizer.learning_rate / plan.optimizer.learning_rate)
            else:
                schedule = schedules.planned(config, whole, optimizer.learning_rate)
        part_plan = replace(plan, config=config, task=task, optimizer=optimizer, schedule=schedule)
        return replace(part_plan, part=name, frozen=name not in self._losses)

    def _build(self, name: str) -> Part:
        task, drawn = self.plan.task, Drawn()
        if name in self._losses:
            part = Part(name, task.model_of(name), partial(self._loss, name))
        elif name in self._averages:
            part = Part(name, task.model_of(name), None)
            part.requires_grad_(False)
        else:
            with drawn:
                part = Part(name, task.model_of(name), None)
            if random := drawn.among(part):
                raise TaskError(
                    f"{type(task).__name__}: no loss trains the model {name!r}, and its {random} is drawn from random numbers; "
                    "load its weights where models() makes it, or give it a loss in losses()"
                )
            part.requires_grad_(False)
            self._digests[name] = digests.digest({**dict(part.named_parameters()), **persistent_buffers(part)})
        self._refuse_shared(name, part)
        self._parts[name] = part
        return part

    def _refuse_shared(self, name: str, part: Part) -> None:
        owners = {
            id(item): other for other, made in self._parts.items() for item in (*made.modules(), *made.parameters())
        }
        for key, item in (*part.named_modules(), *part.named_parameters()):
            if id(item) in owners and (isinstance(item, Tensor) or any(True for _ in item.parameters())):
                raise TaskError(
                    f"{type(self.plan.task).__name__}.models: {name!r} and {owners[id(item)]!r} share {key}, and each is trained "
                    "by a loss of its own: keep it in one of them, and let the loss of the other call that model"
                )

    def _loss(self, name: str, batch: LossInputs) -> Any:
        models = {other: partial(self._outputs, other, other == name) for other in self._engines}
        return self._passes[name](self._losses[name], models, batch)

    def _outputs(self, name: str, runs: bool, *args: Any, **kwargs: Any) -> Any:
        inputs = Arguments(args, kwargs)
        return self._engines[name].outputs(inputs, self._parts[name].inner if runs else None)

    # The step.

    def train_step(self, micro_batches: Iterator[MicroBatch]) -> StepResult:
        """**Collective.** Updates each trained model once, in the order of the losses; each sees all micro-batches.

        The loss is the sum of all, the norm that of all gradients, as each engine reports them; the learning rate is
        the first loss's. A model with ``every_steps`` is updated in some steps only.
        """
        if self._calls is not None:
            self._calls.begin()
        batches = [replace(batch, inputs=LossInputs(batch.inputs, batch.targets)) for batch in micro_batches]
        results: dict[str, StepResult] = {}
        self._steps += 1
        for name in self._losses:
            every = self._every.get(name, 1)
            if self._steps % every:
                continue
            with self._alone(name):
                results[name] = self._trained[name].train_step(iter(batches))
            for teacher in self._teachers.values():
                if teacher.of.model == name and not results[name].skipped:
                    teacher.follow(self._steps // every)
        steps = list(results.values())
        norms = [step.gradient_norm for step in steps]
        norm: Tensor | float | None = norms[0]
        if len(steps) > 1:
            device = steps[0].loss.device
            known = [torch.as_tensor(norm, dtype=torch.float32, device=device) for norm in norms if norm is not None]
            norm = torch.stack(known).norm() if len(known) == len(norms) else None
        loss = sum((step.loss for step in steps[1:]), steps[0].loss)
        skipped, unused = any(step.skipped for step in steps), [name for step in steps for name in step.unused]
        return StepResult(loss, steps[0].learning_rate, norm, skipped, terms_of(results, len(self._losses) > 1), unused)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """**Collective.** Inside, other models' parameters require no gradients."""
        others = [
            parameter for other, parameters in self._learning.items() if other != name for parameter in parameters
        ]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)
        for other, engine in self._engines.items():
            if other != name:
                engine.release_outputs()

    def eval_step(self, batch: Pair, measure: Measure | None) -> Sums:
        """**Collective.** Evaluates the first trained model, and the task's metrics of all models."""
        metrics = self._first.eval_step(batch, measure)
        task = self.plan.task
        if not gives(task, "metrics_of_models"):
            return metrics
        models = {name: partial(self._outputs, name, False) for name in self._engines}
        with self._in_evaluation_mode(), torch.no_grad():
            further = sums(task.metrics_of_models(models, *batch), f"{type(task).__name__}.metrics_of_models")
        for engine in self._engines.values():
            engine.release_outputs()
        return {**metrics, **further} if measure else {}

    def _losses_of(self, inputs: Inputs, targets: Any) -> dict[str, Any]:
        """**Collective.** Returns the losses of a batch in evaluation mode; with gradients if the task asks for
        them."""
        models = {name: partial(self._outputs, name, False) for name in self._engines}
        with self._in_evaluation_mode(), torch.set_grad_enabled(self.plan.task.eval_gradients):
            losses = {name: loss_and_terms(loss(models, inputs, targets))[0] for name, loss in self._losses.items()}
        for engine in self._engines.values():
            engine.release_outputs()
        return losses

    @contextmanager
    def _in_evaluation_mode(self) -> Iterator[None]:
        before = {module: module.training for part in self._parts.values() for module in part.modules()}
        for part in self._parts.values():
            part.eval()
        yield
        for module, mode in before.items():
            module.training = mode

    def evaluating(self) -> AbstractContextManager[None]:
        """**Collective.** Encloses an evaluation of the first trained model."""
        return self._first.evaluating()

    def average(self, decay: float) -> None:
        """Updates the averages of the models that the last step has updated."""
        for name, engine in self._trained.items():
            if self._steps % self._every.get(name, 1) == 0:
                engine.average(decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """**Collective.** Inside, all trained models have their averages."""
        with ExitStack() as stack:
            for engine in self._trained.values():
                stack.enter_context(engine.averaged())
            yield

    # The state.

    def buffers(self) -> Tensors:
        """Returns the buffers of the trained models and of their averages."""
        engines = [*self._trained.values(), *(self._engines[name] for name in self._teachers)]
        return {name: buffer for engine in engines for name, buffer in engine.buffers().items()}

    def state(self) -> EngineState:
        """**Collective** to read to its end. Excludes frozen models."""
        states = [engine.state() for engine in self._trained.values()]
        parameters: Iterable[ParameterState] = chain.from_iterable(state.parameters for state in states)
        sharded = [state.parameters for state in states if isinstance(state.parameters, ShardedParameters)]
        if len(sharded) == len(states):
            parameters = ShardedParameters([shard for group in sharded for shard in group.shards], parameters)
        further = {name: kept for state in states for name, kept in state.aliases.items()}
        of_models = [
            *(state.buffers for state in states),
            *(saved_buffers(self._parts[name]) for name in self._teachers),
        ]
        buffers = {name: buffer for of_model in of_models for name, buffer in of_model.items()}
        return EngineState(self._steps, None, buffers, further, parameters)

    def load_state(self, saved: SavedState) -> None:
        """**Collective.** Each engine reads its model."""
        if unknown := [name for name in saved.shapes if name.partition(".")[0] not in self._trained]:
            raise CheckpointError(f"the checkpoint belongs to another model (parameters differ): {unknown[0]} is gone")
        self._steps = saved.updates
        for name, engine in self._trained.items():
            engine.load_state(SavedPart(saved, name, self._every.get(name, 1)))
        buffers = saved.buffers()
        for name, teacher in self._teachers.items():
            teacher.resume()
            for key, buffer in self._engines[name].buffers().items():
                put(buffers.get(key, buffer), buffer)  # the student's may have changed after the average did
            extra_state.load(self._parts[name], buffers)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """**Collective.** Sums element-wise over the ranks."""
        return next(iter(self._engines.values())).sum_over_ranks(values)

    @property
    def description(self) -> str:
        return f"{self._first.description}, {len(self._engines)} models"

    def close(self) -> None:
        """**Collective.** Closes all engines, last the one that opened the shared process group."""
        opener, *others = self._engines.values()
        with process_group.shared():
            for engine in others:
                engine.close()
        opener.close()

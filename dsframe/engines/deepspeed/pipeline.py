"""DeepSpeed's pipeline: each stage has some layers, and micro-batches pass through the stages one after another.

One forward, one backward (1F1B), as in PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503). With m micro-batches
(``gradient_accumulation_steps``) and p stages, a stage is idle (p - 1) / (m + p - 1) of the time (Huang et al. 2019,
arXiv 1811.06965). Optimizer state may be sharded among the ranks of a stage (ZeRO-1), and offloaded to the CPU.

Ranks are numbered as by DeepSpeed: all ranks of stage 0, then all of stage 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.cluster.exchange import all_gather_json
from dsframe.engine import StepResult
from dsframe.engines import precision
from dsframe.engines.deepspeed import patches, state
from dsframe.engines.deepspeed.engine import ZeroEngine
from dsframe.engines.deepspeed.imports import deepspeed
from dsframe.engines.deepspeed.stages import Cut, Stage
from dsframe.engines.deepspeed.state_pipeline import Column, Share
from dsframe.errors import TaskError
from dsframe.model import formats
from dsframe.model.build import assert_same_model
from dsframe.model.built import BuiltModel
from dsframe.model.built_memory import BuiltMemory
from dsframe.model.micro_batch import Measure, MicroBatch, Pair
from dsframe.model.persistent import compare, saved_buffers, shapes_of
from dsframe.model.plan import Plan
from dsframe.model.state import EngineState, SavedState, ShardedParameters
from dsframe.model.weight_watch import WeightWatch
from dsframe.tasks.task import Sums


class PipelineEngine(ZeroEngine):
    """DeepSpeed's pipeline engine. Only the step and the state differ from :class:`ZeroEngine`."""

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises TaskError or EngineError, before communication, if the model has no such stages."""
        if plan.task.eval_gradients:
            raise TaskError(
                f"{type(plan.task).__name__}.eval_gradients: a pipeline's stages hold parts of the model, so an evaluation cannot "
                "take derivatives of the outputs; choose an engine with whole weights"
            )
        self._cut = Cut(plan)
        self._evaluated: Any = None
        self._evaluating = False
        self._sizes: set[torch.Size] = set()
        """Sizes of the inputs in the last training step."""
        super().__init__(plan)
        assert self.built.watch is not None
        self._engine.basic_optimizer.register_step_pre_hook(self.built.watch.before_update)
        grid = self._engine.grid
        self._column = Column(grid.get_pipe_parallel_group(), grid.pp_group, plan.world.rank)

    def _build(self) -> tuple[nn.Module, nn.Module]:
        # PipelineModule communicates before initialize() would initialize it.
        deepspeed.init_distributed(dist_init_required=False)
        assert_same_model(self, *self._cut.models)  # all stages: ranks with different partitions would deadlock
        self._stage_module: Stage = self._cut.build(self._loss_or_outputs)
        model = self._stage_module.model
        self.built = BuiltModel(
            depends=self._cut.depends,
            groups=self._cut.groups,
            manifest=self._cut.manifest,
            parts=self._cut.parts,
            watch=WeightWatch(self, model, BuiltMemory(model.named_parameters())),
        )
        assert self.built.watch is not None
        self.built.watch.elsewhere = self._stage_module.elsewhere.refused
        task = self.plan.task
        task.context = replace(task.context, ranks=weakref.proxy(self))
        formats.own_dtype(self.plan.config, self.plan.task, model, keeps_float64=False)
        return self._stage_module, model

    def _initialize(self, module: nn.Module) -> None:
        self._start(module)
        patches.recompute_once(self._engine, self._stage_module)
        patches.sum_norms_once(self._engine.optimizer)

    @property
    def description(self) -> str:
        """Name of the engine for the first line of a run."""
        stages, ranks = self._cut.stages, self.plan.batch.data_parallel_size
        return f"{super().description}, a pipeline of {stages} stages x {ranks} rank{'s' if ranks > 1 else ''}"

    def _loss_or_outputs(self, outputs: Any, labels: dict[str, Any]) -> Tensor:
        """Returns the loss of one micro-batch, on the last stage; during an evaluation stores the outputs instead."""
        outputs = precision.cast_outputs(outputs)
        if self._evaluating:
            self._evaluated = outputs
            return torch.zeros((), device=self.plan.device)
        return self._stage_module.joined(self._loss(outputs, labels["batch"]))

    def _micro_batch(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """Returns a micro-batch in DeepSpeed's form. Targets are in a dict, which DeepSpeed passes to the loss
        unchanged. Raises TaskError."""
        inputs = batch.inputs
        if isinstance(inputs, (tuple, list)) and len(inputs) == 1:
            inputs = inputs[0]
        if not isinstance(inputs, Tensor):
            raise TaskError(
                f"a pipeline's first layer takes one tensor, and this task's inputs are a {type(inputs).__name__}; "
                "pack them into one tensor, or train without a pipeline"
            )
        self._cut.try_out(inputs)
        return precision.cast_inputs(inputs, self._dtype), {"batch": batch}

    def train_step(self, micro_batches: Iterator[MicroBatch]) -> StepResult:
        """**Collective.** Passes all micro-batches through the stages; then makes one update."""
        self._begin_step()
        rates = self.plan.schedule(self._updates)
        rates.apply(self._engine.basic_optimizer.param_groups)
        # Read all batches on every stage before any communication: each rank sees errors, and the sizes that will be
        # sent.
        batches = [self._micro_batch(batch) for batch in micro_batches]
        self._settle_sizes({inputs.shape for inputs, _ in batches})
        self._engine.train_batch(iter(batches))
        applied = bool(self._engine.was_step_applied())
        self._updates += applied
        # The loss of this column, from the last stage; train_batch returns the mean of all columns.
        loss = self._engine.dp_group_loss.detach().float().reshape(()).clone()
        norm = self._engine.get_global_grad_norm()
        return self._end_step(self._result(loss, rates.learning_rate, norm, skipped=not applied))

    def _settle_sizes(self, sizes: set[torch.Size]) -> None:
        """Lets stages announce an activation's size only if the inputs' ``sizes`` do not determine it: to read an
        announced size, the next stage's host waits for its device several times for each activation."""
        patches.announce_sizes(self._engine, each=len(sizes) > 1, reset=sizes != self._sizes)
        self._sizes = sizes

    @torch.no_grad()
    def eval_step(self, batch: Pair, measure: Measure | None) -> Sums:
        """**Collective.** The last stage measures; the others have no outputs."""
        engine = self._engine
        engine.module.eval()
        self._evaluating = True
        patches.run_forward(engine, self._micro_batch(MicroBatch(*batch)))
        self._evaluating, outputs, self._evaluated = False, self._evaluated, None
        try:
            return measure(outputs, batch[1]) if measure and engine.is_last_stage() else {}
        finally:
            engine.module.train()

    def state(self) -> EngineState:
        """**Collective.** Returns every stage's parameters on every rank; they are sent one at a time."""
        local = super().state()
        stage, column = self._stage_module, self._column
        buffers = column.buffers(local.buffers)
        assert isinstance(local.parameters, ShardedParameters)  # a pipeline has no tensor parallelism
        shards = [shard for shard in local.parameters.shards if shard.name not in stage.borrowed]
        parameters = ShardedParameters(shards, column.parameters(local.parameters, stage.borrowed))
        return EngineState(local.updates, local.loss_scale, buffers, stage.further_names, parameters)

    def load_state(self, saved: SavedState) -> None:
        """**Collective.** Each stage takes its layers from the whole state, each rank its shards of those."""
        shapes = {name: list(shape) for name, shape in state.shapes(self._model).items()}
        buffer_shapes = shapes_of(saved_buffers(self._model), saved.resized)
        of_ranks = all_gather_json(self, [shapes, buffer_shapes])
        everywhere: list[dict[str, Any]] = [{}, {}]
        for of_rank in of_ranks:
            for part, names in zip(everywhere, of_rank, strict=True):
                part.update(names)
        compare("parameter", everywhere[0], saved.shapes)
        compare("buffer", everywhere[1], shapes_of(saved.buffers(), saved.resized))
        batch = self.plan.batch
        local_state = Share(saved, shapes, buffer_shapes)
        state.load_state(self._engine, self._model, local_state, batch.accumulation_steps, batch.train_batch_size)
        self._updates = saved.updates

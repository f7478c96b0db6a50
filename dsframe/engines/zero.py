"""DeepSpeed ZeRO 0 to 3, with offload to CPU and NVMe (Rajbhandari et al. 2020, arXiv 1910.02054; 2021, arXiv 2104.07857).

Only what the user's file says is handed to DeepSpeed, with three changes that keep one meaning on every engine: the
``scheduler`` stays with dsframe, the batch triangle is spelled out, and Adam is torch's (``dsframe.optimizers`` says why).
What makes ZeRO-3 faster and changes no number is in ``stage3``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsframe import process_group, schedules, switches
from dsframe.checkpoint.state import EngineState, SavedState, persistent_buffers
from dsframe.config.features import WATCHING, shares_activations
from dsframe.engine import Engine, Inputs, Plan, StepResult, build_model, call, loss_of, measure, without_dimensions
from dsframe.engines import jit, mends, partition, precision, sequence, stage3, state_tensor, state_zero, tensor, tiling
from dsframe.engines.library import TiledLinear, deepspeed, groups, logger, set_z3_leaf_module
from dsframe.engines.swap import SwapFolders
from dsframe.errors import EngineError
from dsframe.tasks.task import Sum


class ZeroEngine(Engine):
    """DeepSpeed's engine: optimizer state, gradients and parameters sharded as ``zero_optimization`` says."""

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises EngineError where this machine lacks what the file asks for (fp16, libaio)."""
        self.plan = plan
        self._stage = plan.config.deepspeed.zero_optimization.stage
        self._whole = (
            plan.config.settings.deepspeed.accumulate == "whole"
            and self._stage >= 2
            and plan.batch.accumulation_steps > 1
        )
        self._tiles = tiling.Tiles({}, {})
        self._slices: sequence.Slices | None = None
        self._dtype = precision.parameter_dtype(plan.config)
        self._refuse_what_the_machine_lacks()
        if plan.config.deepspeed.log_level is None and not plan.verbose:
            logger.setLevel(logging.ERROR)
        # On CPUs DeepSpeed would compile this op at start, and leave 66 MiB a rank in /dev/shm; training never uses it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        jit.prepare(jit.needed_ops(plan.config, plan.optimizer), plan.world)
        process_group.open_process_group(plan.world, plan.device)
        document = self._handover()
        self._swap = SwapFolders(document, plan.world, plan.device)
        # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 has renamed; on every step, and nothing to do about.
        if not plan.verbose:
            warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+_tensor.* is deprecated", FutureWarning)
            # And a pipeline's stages that are cut send inside of a backward pass, which torch takes for a mistake.
            warnings.filterwarnings("ignore", r"c10d::\w+: an autograd kernel was not registered", UserWarning)
        with contextlib.nullcontext() if plan.verbose else _quiet():
            stage3.prepare()
            module, self._model = self._build()
            refuse_scalars(self._model)
            elements = sum(parameter.numel() for parameter in module.parameters())
            self._kept = not self._tiles.pieces and plan.config.deepspeed.zero_optimization.keeps_whole(elements)
            if self._kept:
                stage3.keep_whole(document["zero_optimization"])
            if self._stage == 3 and plan.device.type == "cpu":
                stage3.copy_once(document["zero_optimization"])
            self._shares = self._initialize(module, document)
        if shares_activations(plan.config.deepspeed, plan.config.settings):
            to_host = plan.config.deepspeed.activation_checkpointing.cpu_checkpointing
            partition.share_out(module, self._tensor_group(), to_host=to_host)
        self._rate_shares = schedules.shares(self._engine.basic_optimizer.param_groups, plan.optimizer.learning_rate)
        self._undo_hidden_step()
        mends.keep_norm(self._engine)
        mends.scale_until_updated(self._engine.optimizer)
        if plan.config.settings.on_nonfinite == "skip":
            mends.look_before_each_step(self._engine)
        self._updates = 0

    def _build(self) -> tuple[nn.Module, nn.Module]:
        """**Collective.** The module that DeepSpeed trains, and the one that knows its parameters by the names of the state."""
        model = build_model(self)
        if self.plan.batch.sequence_parallel_size > 1:
            self._slices = sequence.Slices(self.plan, model)
        # A block that is recomputed while it is differentiated needs all its parameters the whole time: ZeRO-3 shall gather and
        # release it as one, not module by module, which would release under autograd's feet (measured: shapes of 0). And one
        # that is compiled would fall apart at each hook.
        for block in switches.units(model):
            set_z3_leaf_module(block, True)
        self._tiles = tiling.tile(
            model, self.plan.config.settings.model.tiling if self._stage == 3 else None, TiledLinear
        )
        return model, model

    def _initialize(self, module: nn.Module, document: dict[str, Any]) -> dict[str, state_tensor.Cut]:
        """**Collective.** Starts DeepSpeed's engine on ``module``. Returns how its parameters are cut, by name."""
        splits = self.plan.batch.tensor_parallel_size > 1
        if self._slices is not None:  # DeepSpeed would divide by ranks that it need not know of
            for key in ("train_batch_size", "sequence_parallel_size", "data_parallel_size"):
                document.pop(key, None)
        if splits:
            document.pop("train_batch_size")  # DeepSpeed counts ranks that share layers in it, but not at stage 3
            tensor.prepare(document["tensor_parallel"], module, self.plan)
        self._engine, *_ = deepspeed.initialize(model=module, config=document, dist_init_required=False)
        stage3.gather_at_once(self._engine)
        return tensor.cuts(self._model) if splits else {}

    def _tensor_group(self) -> dist.ProcessGroup:
        """The ranks among which this rank's layers are cut."""
        return tensor.group()

    def _undo_hidden_step(self) -> None:
        """At stage 0 in 16 bits DeepSpeed makes the optimizer's state by a step with zero gradients, and leaves it at that.

        Adam's bias correction would be one step ahead and weight decay have shrunk the masters: another training than at
        any other stage. Source: deepspeed 0.19.8, ``runtime/fp16/{unfused,fused}_optimizer.py`` (initialize_optimizer_states).
        """
        optimizer = self._engine.optimizer
        with torch.no_grad():
            for flat, masters in zip(
                getattr(optimizer, "fp16_groups_flat", ()), getattr(optimizer, "fp32_groups_flat", ()), strict=False
            ):
                masters.copy_(flat)
            for group, masters in zip(
                getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=False
            ):
                torch._foreach_copy_(list(masters), list(group))
        if hasattr(optimizer, "fp32_groups") or hasattr(optimizer, "fp32_groups_flat"):
            self._engine.basic_optimizer.state.clear()

    def _refuse_what_the_machine_lacks(self) -> None:
        accelerator = deepspeed.get_accelerator()
        if self._dtype == torch.float16 and not accelerator.is_fp16_supported():
            raise EngineError("fp16: DeepSpeed does not run it on this processor; use bf16, or torch_autocast")
        if precision.autocast_dtype(self.plan.config, self.plan.device) == torch.float16:  # where the file names none
            raise EngineError('torch_autocast: float16 here, with losses not scaled; write "dtype": "bfloat16"')

    def _handover(self) -> dict[str, Any]:
        document = self.plan.config.for_deepspeed(self.plan.world.size)
        for section in WATCHING:  # dsframe does this itself, the same on every engine
            document.pop(section, None)
        document.pop("scheduler", None)
        document["optimizer"] = self.plan.optimizer.for_deepspeed()
        return document

    @property
    def description(self) -> str:
        """For the first line of a run."""
        zero = self.plan.config.deepspeed.zero_optimization
        parts = [f"DeepSpeed ZeRO-{self._stage}"]
        for what, section in (("optimizer", zero.offload_optimizer), ("parameters", zero.offload_param)):
            if section is not None and section.device != "none":
                parts.append(f"{what} on {section.device.upper() if section.device == 'cpu' else 'NVMe'}")
        if self._kept:
            parts.append("weights kept whole")
        if self.plan.batch.tensor_parallel_size > 1:
            parts.append(f"layers cut among {self.plan.batch.tensor_parallel_size} ranks")
        if self.plan.batch.sequence_parallel_size > 1:
            parts.append(f"sequences cut among {self.plan.batch.sequence_parallel_size} ranks")
        return ", ".join(parts)

    @property
    def _tensor_rank(self) -> int:
        """Which share of each layer is this rank's."""
        return self.plan.world.rank % self.plan.batch.tensor_parallel_size

    def train_step(self, micro_batches: Iterator[tuple[Inputs, Any]]) -> StepResult:
        """**Collective.** One optimizer update through DeepSpeed's forward, backward and step."""
        rates = self.plan.schedule(self._updates)
        rates.apply(self._engine.basic_optimizer.param_groups, self._rate_shares)
        if self._slices is not None:
            micro_batches = map(self._slices.cut, micro_batches)
        total = self._accumulate_whole(micro_batches) if self._whole else self._accumulate(micro_batches)
        applied = bool(self._engine.was_step_applied())
        self._updates += applied
        loss = (total / self.plan.batch.accumulation_steps).float()
        if self._slices is not None:
            loss = self._slices.mean(loss)
        return StepResult(loss, rates.learning_rate, self._engine.get_global_grad_norm(), not applied)

    def _accumulate(self, micro_batches: Iterator[tuple[Inputs, Any]]) -> Tensor:
        """DeepSpeed's own way: reduces once in a step at stages 0 and 1, after each micro-batch at 2 and 3. The losses' sum."""
        losses = []
        for inputs, targets in micro_batches:
            loss = loss_of(self.plan.task, self._forward(inputs), targets)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def _accumulate_whole(self, micro_batches: Iterator[tuple[Inputs, Any]]) -> Tensor:
        """Reduces once in a step at stages 2 and 3 too. DeepSpeed has no key for it, and leaves it to us to say when to step."""
        losses = []
        with self._engine.coalesce_grad_reduction():
            for inputs, targets in micro_batches:
                loss = loss_of(self.plan.task, self._forward(inputs), targets)
                self._engine.backward(loss)
                losses.append(loss.detach())
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        self._engine.set_gradient_accumulation_boundary(None)
        return sum(losses[1:], losses[0])

    def _forward(self, inputs: Inputs) -> Any:
        return precision.cast_outputs(call(self._engine, precision.cast_inputs(inputs, self._dtype)))

    @torch.no_grad()
    def eval_step(self, batch: tuple[Inputs, Any], valid: int) -> Mapping[str, Sum]:
        """**Collective.** The task's metrics; at stage 3 every rank's forward pass gathers the others' parameters."""
        inputs, targets = batch if self._slices is None else self._slices.cut(batch)
        self._engine.eval()
        outputs = self._forward(inputs)
        self._engine.train()
        if self._stage == 3:
            stage3.forget_evaluation(self._engine)
        return measure(self.plan.task, outputs, targets, valid if self._tensor_rank == 0 else 0)

    def buffers(self) -> dict[str, Tensor]:
        """This rank's, of its own stage in a pipeline."""
        return persistent_buffers(self._model)

    def state(self) -> EngineState:
        """**Collective** to read to its end; at stages 1 to 3 each parameter is gathered when its turn comes."""
        state = self._tiles.join(state_zero.state(self._engine, self._model, self._updates))
        return state_tensor.whole(state, self._shares, self._tensor_group()) if self._shares else state

    def load_state(self, saved: SavedState) -> None:
        """**Collective.** Each rank takes its shares out of the whole parameters."""
        if self._shares:
            saved = state_tensor.Shares(saved, state_zero.shapes(self._model), self._shares, self._tensor_rank)
        batch = self.plan.batch
        state_zero.load_state(
            self._engine, self._model, self._tiles.cut(saved), batch.accumulation_steps, batch.train_batch_size
        )
        self._updates = saved.updates

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """**Collective.** Element-wise sum over the ranks."""
        return process_group.sum_over_ranks(values)

    def close(self) -> None:
        """**Collective.** Frees DeepSpeed's buffers and hooks, and leaves the process group."""
        self._engine.destroy()
        process_group.close_process_group()
        groups._release_process_group_references()  # else a further run of this process would speak through groups that are gone
        self._swap.remove()


def refuse_scalars(model: nn.Module) -> None:
    """DeepSpeed 0.19.8 sends parameters as bytes when it starts (``runtime/engine.py``, _broadcast_model)."""
    if names := without_dimensions(model):
        raise EngineError(
            f"DeepSpeed cannot send a parameter without dimensions, as {names} is: make its shape [1], or choose "
            'engine "ddp", "horovod" or "single"'
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed's set-up warns about its own use of torch, and a pipeline's prints its layers; none of it is for the user."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield

"""All changes to DeepSpeed's behaviour, each with its reason and the upstream code.

``PATCHES`` (``patches.json``) lists them. Each has a test (``tests/engines/test_patches.py``) that shows the fault
without the patch and fails with "no longer needed" once DeepSpeed is fixed. ``_upstream`` is the guard: if the code
that a patch changes is missing, the engine does not start, and the message names the patch.

This module does not import DeepSpeed: one of the patches is for its import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import math
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from dsframe.engines import precision
from dsframe.engines.lent import Alike, lend, root_of, take_back
from dsframe.errors import EngineError
from dsframe.model import recomputation
from dsframe.text import Json, table_of
from dsframe.values import tensors_of

PATCHES: dict[str, Json] = table_of(__file__)
"""Name -> ``reason``: what goes wrong without it; ``upstream``: files and functions in DeepSpeed's package; ``later``:
what is called during or after training, as ``module:name``."""


def version() -> str:
    """Returns the version of the installed DeepSpeed."""
    return importlib.metadata.version("deepspeed")


def _upstream(patch: str, module: str, *path: str) -> Any:
    """Returns an object of DeepSpeed. Raises EngineError, naming the patch, if it does not exist."""
    try:
        target: Any = importlib.import_module(f"deepspeed.{module}")
        for name in path:
            target = getattr(target, name)
    except (ImportError, AttributeError):
        where = ".".join((f"deepspeed.{module}", *path))
        raise EngineError(
            f'DeepSpeed {version()} has no {where}, which the patch "{patch}" changes ({PATCHES[patch]["reason"]}); '
            "install deepspeed==0.19.8"
        ) from None
    return target


# Import and start.


@contextlib.contextmanager
def without_mlflow() -> Iterator[None]:
    """Patch "mlflow": inside, its import raises ImportError, unless it was imported before."""
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # Python's marker for a blocked import
    try:
        yield
    finally:
        del sys.modules["mlflow"]


def orthogonalize_in_fp32() -> None:
    """Patch "muon_dtype": on CPUs, with any instruction set."""
    _upstream("muon_dtype", "runtime.zero.muon.original_muon", "ns_compute_dtype")
    _upstream("muon_dtype", "runtime.zero.muon.original_muon").ns_compute_dtype = lambda method="gram": torch.float32


def leave_out_shm_comm() -> None:
    """Patch "shm_comm": skips DeepSpeed's test whether this machine can build it, which runs a compiler on other ops."""
    _upstream("shm_comm", "comm.torch", "build_shm_op")
    _upstream("shm_comm", "comm.torch").build_shm_op = lambda: None


def fill_lists() -> None:
    """Patch "lists": stage 3 gives a module the list that it is called with, which the module may add to."""
    hooks = _upstream("lists", "runtime.zero.parameter_offload")
    replace = _upstream("lists", "runtime.zero.utils", "apply_to_tensors_only")
    _upstream("lists", "runtime.zero.parameter_offload", "apply_to_tensors_only")

    def in_place(function: Callable[..., Any], value: Any, warning_msg_fn: Any = None) -> Any:
        if not isinstance(function, Alike):  # called by a hook, not by itself
            hook = cast(Any, function).__self__
            if hook.__name__ == "PreBackwardFunctionForModule":
                in_place(Alike(functools.partial(gather_before_backward, hook), ()), value, warning_msg_fn)
                return None
            return in_place(Alike(lambda own: lend(own, function(own)), tensors_of(value)), value, warning_msg_fn)
        if isinstance(value, list):
            value[:] = [in_place(function, one) for one in value]
            return value
        return replace(function, value, warning_msg_fn)

    if not getattr(replace, "fills_lists", False):
        in_place.fills_lists = True  # type: ignore[attr-defined]
        for module in (hooks, _upstream("lists", "runtime.zero.utils")):  # it calls itself by its name
            module.apply_to_tensors_only = in_place


def keep_writes(model: nn.Module) -> Callable[[Any], None]:
    """Patch "writes": stage 3 calls modules with other tensors in the memory of their inputs, which modules may write to.

    Returns a function to be called with DeepSpeed's engine. It moves the hooks that the modules have now, such as a user's,
    behind those that hook the outputs' gradients, and before those that release the weights, which they may read.
    """
    before = [(module, [*module._forward_hooks]) for module in model.modules()]

    def close(engine: Any) -> None:
        # For a frozen model ``engine.optimizer`` is the offload object itself.
        offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        releasing = {handle.id for handle in offload.forward_hooks}
        for module, keys in before:
            module.register_forward_hook(take_back, with_kwargs=True)
            hooks = cast(OrderedDict[int, Any], module._forward_hooks)
            for key in (*keys, *releasing.intersection(hooks)):
                hooks.move_to_end(key)

    return close


def gather_before_backward(hook: Any, output: Tensor) -> Tensor:
    """Patch "outputs": the output of a module stays itself. ``hook``: DeepSpeed's function, which would wrap it."""
    if (root := root_of(output)).grad_fn is not None:
        call = SimpleNamespace()
        hook.setup_context(call, (output,), output)
        root.register_hook(lambda _: call.pre_backward_function(call.module))  # type: ignore[no-untyped-call]
    return output


@contextlib.contextmanager
def scalars_sent() -> Iterator[None]:
    """Patch "scalars": inside, while an engine starts, scalars are sent with a dimension."""
    engines = _upstream("scalars", "runtime.engine", "DeepSpeedEngine")
    shards = _upstream("scalars", "runtime.zero.partition_parameters", "Init")
    broadcast = _upstream("scalars", "runtime.engine", "DeepSpeedEngine", "_broadcast_model")
    shard = _upstream("scalars", "runtime.zero.partition_parameters", "Init", "_zero_init_param")

    def broadcast_with_dimension(engine: Any) -> None:
        with _dimensions(engine.module.parameters()):
            broadcast(engine)

    def shard_with_dimension(init: Any, parameter: Any) -> None:
        if parameter.ndim:
            shard(init, parameter)
            return
        parameter.data = parameter.data.view(1)
        shard(init, parameter)
        parameter.ds_shape = torch.Size()  # shape after gathering

    with (
        mock.patch.object(engines, "_broadcast_model", broadcast_with_dimension),
        mock.patch.object(shards, "_zero_init_param", shard_with_dimension),
    ):
        yield


@contextlib.contextmanager
def _dimensions(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, every tensor of ``tensors`` has at least one dimension."""
    scalars = [tensor for tensor in tensors if not tensor.ndim]
    for tensor in scalars:
        tensor.data = tensor.data.view(1)
    try:
        yield
    finally:
        for tensor in scalars:
            tensor.data = tensor.data.view(())


def leave_out_debug_symbols() -> None:
    """Patch "debug_symbols": for every op that this process compiles from now on."""
    options = _upstream("debug_symbols", "ops.op_builder.cpu.builder", "CPUOpBuilder", "cxx_args")
    if not hasattr(options, "__wrapped__"):

        @functools.wraps(options)
        def without(builder: Any) -> list[str]:
            return [option for option in options(builder) if option != "-g"]

        _upstream("debug_symbols", "ops.op_builder.cpu.builder", "CPUOpBuilder").cxx_args = without


def silence_torch_warnings() -> None:
    """Patch "torch_warnings": for the rest of the process."""
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+_tensor.* is deprecated", FutureWarning)
    # A pipeline sends tied weights, which require gradients; torch warns about that.
    warnings.filterwarnings("ignore", r"c10d::\w+: an autograd kernel was not registered", UserWarning)


def check_later_ones() -> None:
    """Checks at start the objects that later patches need. Raises EngineError if one is missing."""
    for patch, row in PATCHES.items():
        for target in row.get("later", ()):
            module, _, path = target.partition(":")
            _upstream(patch, module, *path.split("."))


def release_groups() -> None:
    """Patch "groups": after the process group has been destroyed."""
    _upstream("groups", "utils.groups", "_release_process_group_references")()


def release_model(model: Any) -> None:
    """Patch "models": after ZeRO-3 has ended."""
    stack = _upstream("models", "runtime.zero.parameter_offload", "FWD_MODULE_STACK")
    modules = set(model.modules())  # after an error it contains all modules whose forward pass had begun
    stack[:] = [held for held in stack if held not in modules]
    coordinator = ("runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator")
    function = _upstream("models", *coordinator, "_PartitionedParameterCoordinator__params_to_release")
    for cell in function.__closure__ or ():  # closure of instrument_w_nvtx, around functools.lru_cache
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


# The step.


def keep_norm(engine: Any) -> None:
    """Patch "norm": if the file does not clip, clips by an infinite limit."""
    if engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization():
        return
    _upstream("norm", "runtime.engine", "DeepSpeedEngine", "clip_fp32_gradients")
    clip_grad_norm_ = _upstream("norm", "runtime.utils", "clip_grad_norm_")
    limit = engine.gradient_clipping() or math.inf  # infinity: clips nothing, gradients are multiplied by 1.0

    def clip() -> None:
        if engine.has_moe_layers:
            engine._global_grad_norm = _clip_with_experts(engine, limit)
        else:
            parameters = list(engine.module.parameters())
            with _dimensions([parameter.grad for parameter in parameters if parameter.grad is not None]):
                engine._global_grad_norm = clip_grad_norm_(parameters, max_norm=limit, mpu=engine.mpu)

    engine.gradient_clipping, engine.clip_fp32_gradients = lambda: limit, clip


def _clip_with_experts(engine: Any, limit: float) -> Tensor | None:
    """Patch "expert_norm". **Collective.** Counts replicated gradients once, and each expert once."""
    _upstream("expert_norm", "moe.utils", "is_moe_param")
    of_all, of_experts = list[Tensor](), list[Tensor]()
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            (of_all if getattr(parameter, "allreduce", True) else of_experts).append(parameter.grad)
    (group,) = engine.expert_parallel_group.values()

    def norm(_: list[Tensor]) -> Tensor:
        spread = precision.total_norm(of_experts).square()
        dist.all_reduce(spread, group=group)
        return (precision.total_norm(of_all).square() + spread).sqrt()

    return precision.clip([*of_all, *of_experts], 0.0 if math.isinf(limit) else limit, 1.0, norm, always=True)


def scale_until_updated(optimizer: Any) -> None:
    """Patch "loss_scale": changes the scale after the update, as on every other engine."""
    if not getattr(optimizer, "dynamic_loss_scale", False):
        return
    for module, name in (("stage_1_and_2", "DeepSpeedZeroOptimizer"), ("stage3", "DeepSpeedZeroOptimizer_Stage3")):
        _upstream("loss_scale", f"runtime.zero.{module}", name, "_update_scale")
    move, update, overflows = optimizer._update_scale, optimizer.step, list[bool]()

    def step(*arguments: Any, **keywords: Any) -> Any:
        result = update(*arguments, **keywords)
        while overflows:
            move(overflows.pop())
        return result

    optimizer._update_scale, optimizer.step = overflows.append, step


def look_before_each_step(engine: Any) -> None:
    """Patch "nonfinite": sets ``overflow``, which DeepSpeed's engine reads after each step."""
    _upstream("nonfinite", "runtime.engine", "DeepSpeedEngine", "_take_model_step")
    optimizer = engine.optimizer
    if hasattr(optimizer, "overflow"):
        return
    update = optimizer.step

    def guarded(*arguments: Any, **keywords: Any) -> Any:
        gradients = precision.gradients_of([p for group in optimizer.param_groups for p in group["params"]])
        norm = precision.clip(gradients, 0.0, always=True)
        if engine.mpu is not None and norm is not None:
            # Ranks that split one model have different gradients, and must decide the same.
            dist.all_reduce(norm, group=engine.mpu.get_model_parallel_group())
        if engine.has_moe_layers and norm is not None:
            dist.all_reduce(norm)  # ranks have different experts, and must decide the same
        optimizer.overflow = not precision.finite(norm)
        return None if optimizer.overflow else update(*arguments, **keywords)

    optimizer.step = guarded


def reduce_in_order(engine: Any) -> None:
    """Patch "order": stages 1 and 2 reduce all parameters in one order on all ranks, with zeros for missing gradients.

    A gradient that arrives early waits for those before it, at most until the end of the backward pass.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "reduce_ready_partitions_and_remove_grads") or hasattr(optimizer, "fp16_groups"):
        return  # stage 0 fills in zeros, stage 3 gathers in its own order
    for name in ("reduce_ready_partitions_and_remove_grads", "independent_gradient_partition_epilogue"):
        _upstream("order", "runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", name)
    reduce = optimizer.reduce_ready_partitions_and_remove_grads
    finish = optimizer.independent_gradient_partition_epilogue
    order = [
        (parameter, group)
        for group, members in enumerate(optimizer.bit16_groups)
        for parameter in members
        if parameter.requires_grad
    ]
    if optimizer.partition_gradients or optimizer.overlap_comm:  # reduced during the backward pass, not after it
        order.reverse()
    arrived, turn = set[Tensor](), 0

    def come(parameter: Tensor, group: int) -> None:
        nonlocal turn
        if not (optimizer.partition_gradients or optimizer.is_gradient_accumulation_boundary()):
            return
        if not getattr(parameter, "ds_grad_is_ready", True):  # only a part of it has arrived
            return
        arrived.add(parameter)
        while turn < len(order) and order[turn][0] in arrived:
            reduce(*order[turn])
            turn += 1

    def close() -> None:
        nonlocal turn
        optimizer.setup_buckets()
        for parameter, group in order[turn:]:
            if optimizer.get_gradient_for_reduction(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
                if optimizer.use_grad_accum_attribute:
                    optimizer._fill_param_grad_accum_attribute(parameter)
            reduce(parameter, group)
        arrived.clear()
        turn = 0
        finish()

    optimizer.reduce_ready_partitions_and_remove_grads = come
    optimizer.independent_gradient_partition_epilogue = close


def zero_unused(engine: Any) -> None:
    """Patch "unused": after a backward pass, parameters without gradients have zeros, as on every other engine."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "grad_partitions_flat_buffer"):
        return
    for name in ("partition_grads", "independent_gradient_partition_epilogue", "clear_backward_seen_flag"):
        _upstream("unused", "runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", name)
    partition, finish = optimizer.partition_grads, optimizer.independent_gradient_partition_epilogue
    begin = optimizer.clear_backward_seen_flag
    trained = [parameter for group in optimizer.fp16_groups for parameter in group if parameter.requires_grad]
    arrived = set[int]()

    def come(parameters: Any, partitions: Any) -> Any:
        arrived.update(parameter.ds_id for parameter in parameters)
        return partition(parameters, partitions)

    def close() -> None:
        finish()
        unused = [parameter for parameter in trained if parameter.ds_id not in arrived]
        if unused:  # a gradient that arrives later in this pass replaces the zeros
            dtype = optimizer.gradient_accumulation_dtype
            partition(
                unused,
                [torch.zeros_like(parameter.ds_tensor, dtype=dtype, device=engine.device) for parameter in unused],
            )

    def forget() -> None:
        arrived.clear()
        begin()

    optimizer.partition_grads, optimizer.independent_gradient_partition_epilogue = come, close
    optimizer.clear_backward_seen_flag = forget


def reduce_leaf_modules(engine: Any) -> Callable[[], list[str]]:
    """Patch "leaf": a module that is gathered as one unit reduces its gradients when the backward pass of all its calls
    has ended, whatever holds their inputs and outputs. DeepSpeed's hooks see tensors and tuples of them only.

    Returns a function to be called after a backward pass. It returns the modules with gradients that were not reduced.
    """
    optimizer, calls, lost = engine.optimizer, Counter[nn.Module](), list[str]()
    if not getattr(optimizer, "leaf_parameters", None):
        return list
    for name in (
        "create_reduce_and_remove_grad_hooks",
        "clear_backward_seen_flag",
        "independent_gradient_partition_epilogue",
    ):
        _upstream("leaf", "runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", name)
    forget, finish = optimizer.clear_backward_seen_flag, optimizer.independent_gradient_partition_epilogue
    weights = {module: [w for w in held if w.requires_grad] for module, held in optimizer.leaf_parameters.items()}
    names = {module: name for name, module in engine.module.named_modules()}

    def begin() -> None:
        calls.clear()
        forget()

    def call(reduce: Callable[..., None], module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        calls[module] += 1
        tensors = [leaf for leaf in tensors_of((args, kwargs)) if leaf.requires_grad]
        if tensors and all(leaf.grad_fn is not None for leaf in tensors):  # torch.autograd.grad cannot wait for others
            register_multi_grad_hook(tensors, functools.partial(ended, reduce, module))

    def ended(reduce: Callable[..., None], module: nn.Module, _: Any) -> None:
        calls[module] -= 1
        if not calls[module] and any(w.requires_grad for w in weights[module]):  # else it is another model's loss
            reduce(module, None, None)

    def close() -> None:
        for module, held in weights.items():
            # Its inputs have no gradients or no history, or the loss does not depend on one of its calls.
            for weight in held if calls[module] > 0 else ():
                if weight.grad is None and weight.shape != weight.ds_shape:
                    continue  # not gathered: the loss depends on none of its calls, see zero_unused
                if weight.grad is None:
                    weight.grad = torch.zeros(weight.ds_shape, dtype=weight.dtype, device=weight.device)
                optimizer.reduce_ready_partitions_and_remove_grads(weight)
        finish()
        lost.extend(names[module] for module, held in weights.items() if any(w.grad is not None for w in held))

    def end() -> list[str]:
        found = lost[:]
        lost.clear()
        return found

    for module, handle in zip(optimizer.leaf_parameters, optimizer._leaf_module_hooks, strict=True):
        reduce = module._backward_hooks[handle.id]
        handle.remove()
        module.register_forward_pre_hook(functools.partial(call, reduce), with_kwargs=True)
    optimizer.clear_backward_seen_flag, optimizer.independent_gradient_partition_epilogue = begin, close
    return end


@torch.no_grad()
def undo_hidden_step(engine: Any) -> None:
    """Patch "hidden_step": resets the masters to the model's weights, and clears the optimizer's state.

    Otherwise Adam's bias correction would be one step ahead and weight decay would have shrunk the masters, unlike at
    any other stage.
    """
    _upstream("hidden_step", "runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer", "initialize_optimizer_states")
    optimizer = engine.optimizer
    for flat, masters in zip(
        getattr(optimizer, "fp16_groups_flat", ()), getattr(optimizer, "fp32_groups_flat", ()), strict=False
    ):
        masters.copy_(flat)
    for group, masters in zip(
        getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=False
    ):
        torch._foreach_copy_(list(masters), list(group))
    if hasattr(optimizer, "fp32_groups") or hasattr(optimizer, "fp32_groups_flat"):
        engine.basic_optimizer.state.clear()


def prologue_of_loss(engine: Any) -> Callable[[], None]:
    """Patch "prologue": disables the hooks on outputs. Returns a function to be called when a backward pass begins."""
    begin: Callable[[], None] = engine._backward_prologue
    engine._backward_prologue = lambda: None
    engine._backward_prologue_per_tensor = lambda gradient: gradient
    return begin


# Experts.


@contextlib.contextmanager
def recorded_routers() -> Iterator[None]:
    """Patch "recorded_routers": inside, AutoEP replaces a model's layers, and new routers' outputs are recorded too."""
    name = "_install_instance_transformers_output_recorders"
    _upstream("recorded_routers", "module_inject.auto_ep_presets.base", name)
    with mock.patch(f"deepspeed.module_inject.auto_ep_presets.base.{name}", _record_again):
        yield


def _record_again(
    model: nn.Module, entries: dict[str, Any], output_capturing: Any, remove_hooks: Callable[[nn.Module], int]
) -> bool:
    registry = output_capturing._CAN_RECORD_REGISTRY
    before = dict(registry)
    remove_hooks(model)
    module: Any
    for module in model.modules():
        if hasattr(module, "_output_capturing_hooks_installed"):
            module._output_capturing_hooks_installed = False
    try:
        registry.update(entries)
        output_capturing.maybe_install_capturing_hooks(model)
    finally:
        registry.clear()
        registry.update(before)
    return True


# ZeRO-3.


def coalesce_gathers(engine: Any) -> None:
    """Patch "gathers": after each update, gathers persistent parameters in one collective instead of one for each."""
    kept = getattr(engine.optimizer, "persistent_parameters", None)
    if not kept:
        return
    absent_status = _upstream("gathers", "runtime.zero.partition_parameters", "ZeroParamStatus", "NOT_AVAILABLE")
    first = kept[0]
    one_by_one = first.all_gather

    def gather(param_list: Any = None, *more: Any, **options: Any) -> Any:  # DeepSpeed passes it by keyword
        if param_list is not kept or more or options:
            return one_by_one(param_list, *more, **options)
        absent = [parameter for parameter in kept if parameter.ds_status is absent_status]
        if absent:
            first.all_gather_coalesced(absent).wait()
        return None

    first.all_gather = gather


def forget_evaluation(engine: Any) -> None:
    """Patch "evaluation": removes the trace of an evaluation before the first training step.

    From a trace DeepSpeed decides once what it gathers again in the backward pass. After one of a forward pass only, it
    would release every module, and send half as much again in every step (seen in its count of bytes).
    """
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    if coordinator.is_record_trace():
        coordinator._invalidate_trace()


@contextlib.contextmanager
def hooks_set_aside(engine: Any) -> Iterator[None]:
    """Patch "hooks_set_aside": inside, modules run without DeepSpeed's hooks. All parameters must be gathered."""
    offload = engine.optimizer.parameter_offload
    handles = [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]
    handle_ids = {handle.id for handle in handles}
    registers = {id(hooks): hooks for handle in handles if (hooks := handle.hooks_dict_ref()) is not None}
    before = {key: dict(hooks) for key, hooks in registers.items()}
    for hooks in registers.values():
        for key in handle_ids.intersection(hooks):
            del hooks[key]
    try:
        yield
    finally:
        for key, hooks in registers.items():  # in the old order, with hooks that a model has added or removed meanwhile
            now = dict(hooks)
            hooks.clear()
            hooks.update(
                {hook_id: hook for hook_id, hook in before[key].items() if hook_id in handle_ids or hook_id in now}
                | now
            )


# Pipelines.


class StagePatches:
    """Patch "pipeline_bounds": base class that must precede DeepSpeed's ``PipelineModule``."""

    parts: list[int]
    stage_id: int
    _set_bounds: Callable[[int, int], None]

    def __init_subclass__(cls) -> None:
        for name in ("_partition_layers", "_set_bounds"):
            _upstream("pipeline_bounds", "runtime.pipe.module", "PipelineModule", name)

    def _partition_layers(self, method: Iterable[int] = ()) -> None:
        self.parts = list(method)
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


def recompute_once(engine: Any, stage: Any) -> None:
    """Patch "pipeline_recompute": uses torch's function, which counts a batch once and keeps the autocast state."""
    _upstream("pipeline_recompute", "runtime.pipe.engine", "PipelineEngine", "_reentrant_activation_checkpointing")
    stage.activation_checkpoint_func = recomputation.checkpoint_function(stage)
    engine._reentrant_activation_checkpointing = lambda: False  # DeepSpeed recognizes its own function only by name


def count_for_clipping(stage: nn.Module) -> None:
    """Patch "pipeline_clipping": marks parameters that are not copies."""
    _upstream("pipeline_clipping", "runtime.utils", "is_model_parallel_parameter")
    parameter: Any
    for parameter in stage.parameters():
        parameter.model_parallel = not parameter.ds_pipe_replicated


def sum_norms_once(optimizer: Any) -> None:
    """Patch "pipeline_groups": each stage computes the norm of all its groups, and one collective sums over the stages."""
    if not hasattr(optimizer, "scaled_global_norm"):
        return
    for name in ("scaled_global_norm", "_model_parallel_all_reduce"):
        _upstream("pipeline_groups", "runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", name)
    of_stage, add = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def of_all() -> Tensor:
        with mock.patch.object(optimizer, "_model_parallel_all_reduce", return_value=None):
            norm = of_stage()
        square = torch.where(norm < 0, torch.nan, norm.square())  # DeepSpeed returns -1 for a norm that is not finite
        add(tensor=square, op=dist.ReduceOp.SUM)
        return torch.where(square.isfinite(), square.sqrt(), -1.0)

    optimizer.scaled_global_norm = of_all


def run_forward(engine: Any, micro_batch: Any) -> None:
    """Patch "pipeline_evaluation". **Collective.** Runs one micro-batch through the stages, then the loss function."""
    engine.set_dataiterator(iter([micro_batch]))
    engine._compute_loss = True
    # Batches of evaluations may have other shapes, and DeepSpeed caches the shapes that stages send.
    engine.reset_activation_shape()
    engine._exec_schedule(engine._inference_schedule(1))
    engine.reset_activation_shape()


def announce_sizes(engine: Any, *, each: bool, reset: bool) -> None:
    """Patch "pipeline_sizes". **Collective.** Sets whether stages announce ``each`` activation's size in the next step.
    Otherwise only the first one's, and only if ``reset``: if it differs from the last step's."""
    engine.dynamic_shape = each
    if reset:
        engine.reset_activation_shape()

"""The features that a file switches on, by name, so that an engine can refuse those that it does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from dsframe.config.read.findings import dotted
from dsframe.config.read.reader import Path
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.optimizer import MUP
from dsframe.config.schema.settings import Settings

LOGGERS: Mapping[str, str | None]
LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv_monitor": None, "comet": "comet_ml"}
"""DeepSpeed's sections that say where figures are written, and the packages that they need. They mean the same on every engine."""
WATCHING = frozenset({*LOGGERS, "flops_profiler", "comms_logger"})
"""Sections of DeepSpeed's that only watch the training: they are taken off before DeepSpeed sees them, and mean the same on every
engine."""

MADE_HERE = frozenset({"optimizer", "scheduler"})
"""Sections from which dsframe makes what trains, the same on every engine; unknown keys are not forwarded."""


def logger_packages(file: DeepSpeed, settings: Settings) -> Iterator[tuple[Path, str]]:
    """The switches of sections that are on and need a package, and its module."""
    for section, package in LOGGERS.items():
        if package and file.on(section):
            yield (section, "enabled"), package
    if settings.on("mlflow"):
        yield ("dsframe", "mlflow", "enabled"), "mlflow"


class Feature(NamedTuple):
    """One thing that the file asks for."""

    name: str
    """Stable name, as in the engines' table."""
    path: str
    """Dotted path of the key that asks for it."""
    description: str
    """Text for the start of a sentence: ``tensor parallelism over 2 ranks``."""
    line: int = 0
    column: int = 0


Found = tuple[str, Path, str]


def features(
    file: DeepSpeed, settings: Settings, position: Callable[[Path], tuple[int, int]] = lambda path: (0, 0)
) -> tuple[Feature, ...]:
    """Everything that the file switches on, in the order of DeepSpeed's documentation.

    ``position`` gives line and column of a key, as ``Config.position`` does.
    """
    return tuple(
        Feature(name, dotted(path), description, *position(path))
        for name, path, description in switched_on(file, settings)
    )


def switched_on(file: DeepSpeed, settings: Settings) -> Iterator[Found]:
    """Name, path and description of everything that is on."""
    yield from _zero(file)
    yield from _parallel(file)
    yield from _numbers(file)
    yield from _optimizer(file, settings)
    yield from _rest(file, settings)


def may_be_fp16(file: DeepSpeed) -> bool:
    """True if ``torch_autocast`` casts to float16, as it does where the file names no dtype and the device is a GPU."""
    name = (file.torch_autocast.dtype or "fp16").removeprefix("torch.")
    return file.torch_autocast.enabled and name in ("fp16", "half", "float16")


def needs_cpu_adam(file: DeepSpeed) -> tuple[str, ...] | None:
    """The key of what only DeepSpeed's own Adam on the CPU can do; None where the file asks for no such thing.

    Source: deepspeed 0.19.8, ``runtime/base_optimizer.py`` (_configure_master_weights), ``ops/adam/zenflow_cpu_adam.py``.
    """
    zero = file.zero_optimization
    if not zero.stage or zero.optimizer_device == "none":
        return None
    if file.fp16.enabled and file.fp16.fp16_master_weights_and_grads:
        return ("fp16", "fp16_master_weights_and_grads")
    if file.bf16.enabled and file.bf16.bf16_master_weights_and_grads:
        return ("bf16", "bf16_master_weights_and_grads")
    return None if zero.zenflow is None else ("zero_optimization", "zenflow")


def own_adam(file: DeepSpeed) -> bool:
    """True if the file's Adam is DeepSpeed's own: on request, or because torch's cannot do what the file asks for."""
    params = file.optimizer.params if file.optimizer else {}
    by_torch = params.get("torch_adam")
    if by_torch is None:
        return params.get("bias_correction") is False or needs_cpu_adam(file) is not None
    return not by_torch


def makes_groups(file: DeepSpeed) -> str:
    """Who makes groups of parameters inside DeepSpeed, so that nobody else can; empty: nobody."""
    kind = file.optimizer.type if file.optimizer else ""
    if kind.lower() in ("muon", *MUP):
        return kind
    return "ZenFlow" if file.zero_optimization.zenflow is not None else ""


def shares_activations(file: DeepSpeed, settings: Settings) -> bool:
    """True if ``partition_activations`` is on, and there are recomputed blocks and ranks that have the same inputs to them."""
    if not file.has("activation_checkpointing") or file.tensor_parallel.autotp_size == 1:
        return False
    return file.activation_checkpointing.partition_activations and bool(settings.model.activation_checkpointing)


def _zero(file: DeepSpeed) -> Iterator[Found]:
    zero = file.zero_optimization
    path: Path = ("zero_optimization",)
    if zero.stage:
        yield f"zero{zero.stage}", (*path, "stage"), f"ZeRO stage {zero.stage}"
    if zero.stage and zero.optimizer_device != "none":
        # Stages 1 and 2 take "nvme" for the CPU, silently; the check says so.
        device = zero.optimizer_device if zero.stage == 3 else "cpu"
        yield f"offload_optimizer_{device}", (*path, "offload_optimizer"), f"optimizer offload to {device}"
        if zero.offload_optimizer is not None and zero.offload_optimizer.ratio < 1.0:
            yield "partial_offload", (*path, "offload_optimizer", "ratio"), "optimizer offload in part"
    if zero.stage == 3 and zero.parameter_device != "none":
        device = zero.parameter_device
        yield f"offload_param_{device}", (*path, "offload_param"), f"parameter offload to {device}"
    if zero.zenflow is not None:
        yield "zenflow", (*path, "zenflow"), "ZenFlow"
    if zero.stage == 3 and zero.zero_hpz_partition_size > 1:
        yield "hpz", (*path, "zero_hpz_partition_size"), "a secondary partition of the parameters"
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if zero.stage and getattr(zero, key):
            yield "zero_quantized", (*path, key), "quantised communication"


def _parallel(file: DeepSpeed) -> Iterator[Found]:
    if file.pipeline.stages > 1:
        yield "pipeline", ("pipeline", "stages"), f"a pipeline of {file.pipeline.stages} stages"
    size = file.tensor_parallel.autotp_size
    if size > 1:
        yield "tensor_parallel", ("tensor_parallel", "autotp_size"), f"tensor parallelism over {size} ranks"
    if (file.sequence_parallel_size or 1) > 1:
        count = file.sequence_parallel_size
        yield "sequence_parallel", ("sequence_parallel_size",), f"sequence parallelism over {count} ranks"
    if file.on("expert_parallel"):
        count = file.expert_parallel.autoep_size
        yield "expert_parallel", ("expert_parallel",), f"expert parallelism over {count} ranks"
    if file.on("hybrid_engine"):
        yield "hybrid_engine", ("hybrid_engine",), "the hybrid engine"
    if file.has("compile") and file.compile.deepcompile:
        yield "deepcompile", ("compile", "deepcompile"), "DeepCompile"


def _numbers(file: DeepSpeed) -> Iterator[Found]:
    if file.fp16.enabled:
        yield "fp16", ("fp16",), "fp16 training"
        if not file.zero_optimization.stage:
            yield "fp16_stage0", ("fp16",), 'fp16 at ZeRO stage 0 (write "zero_optimization": {"stage": 1})'
    if file.bf16.enabled:
        yield "bf16", ("bf16",), "bf16 training"
    if file.torch_autocast.enabled:
        yield "autocast", ("torch_autocast",), "torch.autocast"
        if may_be_fp16(file):
            unsaid = file.torch_autocast.dtype is None
            name = "autocast_unsaid" if unsaid else "autocast_fp16"
            known = ", which is the default on GPUs" if unsaid else ""
            yield name, ("torch_autocast",), f'torch.autocast to float16{known} (write "dtype": "bfloat16")'
    for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        if getattr(file.data_types, key) is not None:
            yield key, ("data_types", key), f"data_types.{key}"
    for section, key in (
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
        ("fp16", "fp16_master_weights_and_grads"),
    ):
        if getattr(file, section).enabled and getattr(getattr(file, section), key):
            yield "low_precision_masters", (section, key), "16-bit master weights or optimizer states"
    if file.communication_data_type is not None:
        kind = file.communication_data_type
        yield "communication_data_type", ("communication_data_type",), f"communication in {kind}"


def _optimizer(file: DeepSpeed, settings: Settings) -> Iterator[Found]:
    if not file.managed_gradient_accumulation:
        yield "unmanaged_accumulation", ("managed_gradient_accumulation",), "managed_gradient_accumulation false"
    if file.gradient_allreduce_op == "sum":
        yield "gradient_sum", ("gradient_allreduce_op",), "adding gradients instead of averaging them"
    if file.has("dsframe", "horovod") and settings.horovod.op == "adasum":
        yield "adasum", ("dsframe", "horovod", "op"), "adasum"
    if file.has("dsframe", "horovod") and settings.horovod.compression == "fp16":
        yield "fp16_compression", ("dsframe", "horovod", "compression"), "fp16 compression"
    for key in ("parameter_groups", "no_decay", "layer_decay"):
        if getattr(settings, key) not in ([], "none", None):
            yield "parameter_groups", ("dsframe", key), "groups of parameters"
    if settings.adapter is not None:
        yield "adapter", ("dsframe", "adapter"), "an adapter beside frozen weights"
        if settings.adapter.base_format is not None:
            yield "quantized_base", ("dsframe", "adapter", "base_format"), "a base in 4 bits"
    if settings.ema is not None:
        yield "ema", ("dsframe", "ema"), "an average of the weights"
    if settings.on_nonfinite == "skip":
        yield "skip_nonfinite", ("dsframe", "on_nonfinite"), "skipping updates that are not finite"
    if file.has("dsframe", "ddp") and settings.ddp.communication != "none":
        yield "gradient_hook", ("dsframe", "ddp", "communication"), f"communication by {settings.ddp.communication}"
    kind = file.optimizer.type.lower() if file.optimizer else ""
    if kind in ("lamb", "lion", "muon"):
        yield kind, ("optimizer", "type"), kind.capitalize()
    if kind in ("adafactor", "rprop"):
        what = f"{kind.capitalize()}, which computes updates from full parameters,"
        yield "whole_parameters", ("optimizer", "type"), what
    if kind == "lbfgs":
        yield "closure", ("optimizer", "type"), "LBFGS, which evaluates a batch several times,"
    if kind in MUP:
        yield "muadam", ("optimizer", "type"), "an optimizer of the package mup"


def _rest(file: DeepSpeed, settings: Settings) -> Iterator[Found]:
    for key in ("partition_activations", "contiguous_memory_optimization", "number_checkpoints", "cpu_checkpointing"):
        if not file.has("activation_checkpointing"):
            break
        # What is kept goes to the CPU on every engine, once there are blocks that keep their inputs alone.
        honoured = key == "cpu_checkpointing" and settings.model.activation_checkpointing
        if getattr(file.activation_checkpointing, key) and not honoured:
            shared = key == "partition_activations" and shares_activations(file, settings)
            yield key if shared else "activation_checkpointing", ("activation_checkpointing", key), key
    if settings.model.tiling is not None:
        yield "tiling", ("dsframe", "model", "tiling"), "tiled linear layers"
    if file.on("data_efficiency"):
        yield "data_efficiency", ("data_efficiency",), "data efficiency"
    for key in ("flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet"):
        if file.on(key):
            yield key, (key,), key
    if file.on("comms_logger"):
        yield "comms_logger", ("comms_logger",), "comms_logger"
    if file.datastates_ckpt is not False:
        yield "datastates", ("datastates_ckpt",), "DataStates checkpoints"

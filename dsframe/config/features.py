"""The features that a file switches on, by name, so that an engine can refuse those that it does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from dsframe.config.read.reader import Path
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.optimizer import MUP
from dsframe.config.schema.precision import DTYPES as DTYPES
from dsframe.config.schema.settings import Settings

LOGGERS: Mapping[str, str | None]
LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv_monitor": None, "comet": "comet_ml"}
"""DeepSpeed's sections that say where metrics are written, and the packages that they need: the same on every engine."""
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


Row = tuple[object, str, str, str]
"""Whether a feature is on, its name, path and description."""


def features(
    file: DeepSpeed, settings: Settings, position: Callable[[Path], tuple[int, int]] = lambda path: (0, 0)
) -> tuple[Feature, ...]:
    """Everything that the file switches on, in the order of DeepSpeed's documentation.

    ``position`` gives line and column of a key, as ``Config.position`` does.
    """
    rows = (*_zero(file), *_parallel(file), *_numbers(file), *_optimizer(file, settings), *_others(file, settings))
    return tuple(Feature(name, path, words, *position(tuple(path.split(".")))) for on, name, path, words in rows if on)


def may_be_fp16(file: DeepSpeed) -> bool:
    """True if ``torch_autocast`` casts to float16, as it does where the file names no dtype and the device is a GPU."""
    return file.torch_autocast.enabled and DTYPES[file.torch_autocast.dtype or "fp16"] == "fp16"


def needs_cpu_adam(file: DeepSpeed) -> Path | None:
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
    name = file.optimizer.type if file.optimizer else ""
    if name.lower() in ("muon", *MUP):
        return name
    return "ZenFlow" if file.zero_optimization.zenflow is not None else ""


def shares_activations(file: DeepSpeed, settings: Settings) -> bool:
    """True if ``partition_activations`` is on, and there are recomputed blocks and ranks that have the same inputs to them."""
    if file.tensor_parallel.autotp_size == 1:
        return False
    return file.activation_checkpointing.partition_activations and bool(settings.model.activation_checkpointing)


def _zero(file: DeepSpeed) -> Iterator[Row]:
    zero, section = file.zero_optimization, "zero_optimization"
    stage, optimizer, parameters = zero.stage, zero.optimizer_device, zero.parameter_device
    # Stages 1 and 2 take "nvme" for the CPU, silently; the check says so.
    optimizer = "cpu" if stage < 3 and optimizer == "nvme" else optimizer
    offloads, path = stage and optimizer != "none", f"{section}.offload_optimizer"
    partial = offloads and zero.offload_optimizer and zero.offload_optimizer.ratio < 1.0
    yield stage, f"zero{stage}", f"{section}.stage", f"ZeRO stage {stage}"
    yield offloads, f"offload_optimizer_{optimizer}", path, f"optimizer offload to {optimizer}"
    yield partial, "partial_offload", f"{path}.ratio", "optimizer offload in part"
    on, path = stage == 3 and parameters != "none", f"{section}.offload_param"
    yield on, f"offload_param_{parameters}", path, f"parameter offload to {parameters}"
    yield zero.zenflow is not None, "zenflow", f"{section}.zenflow", "ZenFlow"
    on, path = stage == 3 and zero.zero_hpz_partition_size > 1, f"{section}.zero_hpz_partition_size"
    yield on, "hpz", path, "a secondary partition of the parameters"
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        yield stage and getattr(zero, key), "zero_quantized", f"{section}.{key}", "quantised communication"


def _parallel(file: DeepSpeed) -> Iterator[Row]:
    stages, tensor, sequence = file.pipeline.stages, file.tensor_parallel.autotp_size, file.sequence_parallel_size or 1
    experts = file.expert_parallel
    yield stages > 1, "pipeline", "pipeline.stages", f"a pipeline of {stages} stages"
    yield tensor > 1, "tensor_parallel", "tensor_parallel.autotp_size", f"tensor parallelism over {tensor} ranks"
    yield sequence > 1, "sequence_parallel", "sequence_parallel_size", f"sequence parallelism over {sequence} ranks"
    words = f"expert parallelism over {experts.autoep_size} ranks"
    yield experts.enabled, "expert_parallel", "expert_parallel", words
    yield file.hybrid_engine.enabled, "hybrid_engine", "hybrid_engine", "the hybrid engine"
    yield file.compile.deepcompile, "deepcompile", "compile.deepcompile", "DeepCompile"


def _numbers(file: DeepSpeed) -> Iterator[Row]:
    model = "bf16" if file.bf16.enabled else "fp16" if file.fp16.enabled else "fp32"
    yield file.fp16.enabled, "fp16", "fp16", "fp16 training"
    words = 'fp16 at ZeRO stage 0 (write "zero_optimization": {"stage": 1})'
    yield file.fp16.enabled and not file.zero_optimization.stage, "fp16_stage0", "fp16", words
    yield file.bf16.enabled, "bf16", "bf16", "bf16 training"
    yield file.torch_autocast.enabled, "autocast", "torch_autocast", "torch.autocast"
    by_device = file.torch_autocast.dtype is None
    name = "autocast_unsaid" if by_device else "autocast_fp16"
    default = ", which is the default on GPUs" if by_device else ""
    words = f'torch.autocast to float16{default} (write "dtype": "bfloat16")'
    yield may_be_fp16(file), name, "torch_autocast", words
    for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        yield getattr(file.data_types, key) is not None, key, f"data_types.{key}", f"data_types.{key}"
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads"):
        section = getattr(file, key[:4])
        path, words = f"{key[:4]}.{key}", "16-bit master weights or optimizer states"
        yield section.enabled and getattr(section, key), "low_precision_masters", path, words
    dtype = file.communication_data_type
    words = f"communication in {dtype}"
    yield dtype not in (None, model), "communication_data_type", "communication_data_type", words


def _optimizer(file: DeepSpeed, settings: Settings) -> Iterator[Row]:
    horovod, adapter, communication = settings.horovod, settings.adapter, settings.ddp.communication
    key = "managed_gradient_accumulation"
    yield not file.managed_gradient_accumulation, "unmanaged_accumulation", key, f"{key} false"
    words = "adding gradients instead of averaging them"
    yield file.gradient_allreduce_op == "sum", "gradient_sum", "gradient_allreduce_op", words
    yield horovod.op == "adasum", "adasum", "dsframe.horovod.op", "adasum"
    path = "dsframe.horovod.compression"
    yield horovod.compression == "fp16", "fp16_compression", path, "fp16 compression"
    for key in ("parameter_groups", "no_decay", "layer_decay"):
        on = getattr(settings, key) not in ([], "none", None)
        yield on, "parameter_groups", f"dsframe.{key}", "groups of parameters"
    yield adapter, "adapter", "dsframe.adapter", "an adapter beside frozen weights"
    on, path = adapter and adapter.base_format, "dsframe.adapter.base_format"
    yield on, "quantized_base", path, "a base in 4 bits"
    yield settings.ema, "ema", "dsframe.ema", "an average of the weights"
    words = "skipping updates that are not finite"
    yield settings.on_nonfinite == "skip", "skip_nonfinite", "dsframe.on_nonfinite", words
    path, words = "dsframe.ddp.communication", f"communication by {communication}"
    yield communication != "none", "gradient_hook", path, words
    name, path = file.optimizer.type.lower() if file.optimizer else "", "optimizer.type"
    yield name in ("lamb", "lion", "muon"), name, path, name.capitalize()
    words = f"{name.capitalize()}, which computes updates from full parameters,"
    yield name in ("adafactor", "rprop"), "whole_parameters", path, words
    yield name == "lbfgs", "closure", path, "LBFGS, which evaluates a batch several times,"
    yield name in MUP, "muadam", path, "an optimizer of the package mup"


def _others(file: DeepSpeed, settings: Settings) -> Iterator[Row]:
    section = "activation_checkpointing"
    for key in ("partition_activations", "contiguous_memory_optimization", "number_checkpoints", "cpu_checkpointing"):
        # Saved inputs go to the CPU on every engine, once there are blocks that keep their inputs only.
        done = key == "cpu_checkpointing" and settings.model.activation_checkpointing
        shared = key == "partition_activations" and shares_activations(file, settings)
        on = getattr(file.activation_checkpointing, key) and not done
        yield on, key if shared else section, f"{section}.{key}", key
    yield settings.model.tiling, "tiling", "dsframe.model.tiling", "tiled linear layers"
    yield file.data_efficiency.enabled, "data_efficiency", "data_efficiency", "data efficiency"
    for key in ("flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger"):
        yield file.on(key), key, key, key
    yield file.datastates_ckpt is not False, "datastates", "datastates_ckpt", "DataStates checkpoints"

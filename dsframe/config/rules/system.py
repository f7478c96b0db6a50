"""Rules about data efficiency, checkpoints, I/O, monitors, and what this machine lacks."""

from __future__ import annotations

from pathlib import Path

from dsframe.config.features import logger_packages
from dsframe.config.rules.context import RuleContext

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Exists while the driver is loaded: tells without torch whether this machine has CUDA devices."""


def check(context: RuleContext) -> None:
    """Report what is wrong with the sections around the training."""
    if context.file.has("data_efficiency"):
        _data(context)
    if context.file.has("activation_checkpointing"):
        _recomputation(context)
    if context.file.has("autotuning"):
        _autotuning(context)
    _system(context)


def _data(context: RuleContext) -> None:
    data = context.file.data_efficiency
    base: tuple[str, ...] = ("data_efficiency",)
    path: tuple[str, ...]
    sampling, routing = data.data_sampling, data.data_routing
    curriculum = sampling.curriculum_learning if sampling else None
    batching = sampling.dynamic_batching if sampling else None
    dropping = routing.random_ltd if routing else None
    if curriculum is not None and curriculum.enabled and curriculum.curriculum_metrics is None:
        path = (*base, "data_sampling", "curriculum_learning")
        context.conflict(path, "curriculum_metrics is required: DeepSpeed raises", "add it")
    dynamic = (*base, "data_sampling", "dynamic_batching")
    if batching is not None and batching.enabled and batching.max_tokens is None:
        context.conflict(dynamic, "max_tokens is required: DeepSpeed raises", "add it")
    if batching and batching.max_batch_size is None and context.wrote(*dynamic, "max_batch_size"):
        context.conflict((*dynamic, "max_batch_size"), "null makes DeepSpeed raise", "remove the key")
    rates = dropping.layer_token_lr_schedule if dropping else None
    if rates is not None and rates.enabled:
        path = (*base, "data_routing", "random_ltd", "layer_token_lr_schedule", "enabled")
        context.conflict(path, "not yet supported: DeepSpeed raises", "write false")
    inner = [(*base, "data_sampling"), (*base, "data_routing")]
    for path, section in zip(inner, (sampling, routing), strict=True):
        if section is not None and section.enabled and not data.enabled:
            context.no_effect(path, "has no effect while data_efficiency.enabled is false", 'add "enabled": true')
    switches = (
        ("data_sampling", "curriculum_learning", sampling, curriculum),
        ("data_routing", "random_ltd", routing, dropping),
    )
    for outer, name, section, part in switches:
        if section is not None and part is not None and part.enabled and not section.enabled:
            message = f"has no effect while {outer}.enabled is false"
            context.no_effect((*base, outer, name), message, 'add "enabled": true there')


def _recomputation(context: RuleContext) -> None:
    checkpointing = context.file.activation_checkpointing
    if checkpointing.contiguous_memory_optimization and not context.findings.fails(("activation_checkpointing",)):
        missing = [key for key in ("partition_activations", "number_checkpoints") if not getattr(checkpointing, key)]
        if missing:
            path = ("activation_checkpointing", "contiguous_memory_optimization")
            where = "in the file or from the program: else deepspeed.checkpointing.configure raises"
            message = f"needs {' and '.join(missing)}, {where}"
            context.findings.note(path, message, code="conflict", at_value=True)


def _autotuning(context: RuleContext) -> None:
    tuner = context.file.autotuning
    if tuner.enabled:
        context.findings.note(("autotuning",), "has no effect without deepspeed --autotuning", code="no-effect")
    for key in ("results_dir", "exps_dir"):
        if getattr(tuner, key) == "":
            context.conflict(("autotuning", key), "must not be empty: DeepSpeed raises", "name a folder")


def _system(context: RuleContext) -> None:
    file = context.file
    if file.has("aio") and file.aio.use_gds and not NVIDIA_DRIVER.exists():
        where = ("aio", "use_gds")
        context.conflict(where, "needs CUDA, which this machine does not have: DeepSpeed raises", "write false")
    if file.has("checkpoint") and file.checkpoint.writer is not None and file.checkpoint.writer.type == "PYTHON":
        path, message = ("checkpoint", "writer", "type"), "the writer PYTHON of DeepSpeed 0.19.8 fails when it saves"
        context.findings.warning(path, message, "remove the writer", code="broken", at_value=True)
    _packages(context)
    if file.disable_allgather:
        context.no_effect(("disable_allgather",), "has no effect: DeepSpeed 0.19 reads it and never uses it")
    if file.on("weight_quantization"):
        message = "has no effect on training, only on inference"
        context.findings.note(("weight_quantization",), message, code="no-effect")


def _packages(context: RuleContext) -> None:
    """Report packages that a section needs. Without them rank 0 alone raises, and the others wait for it."""
    wanted = list(logger_packages(context.file, context.file.dsframe))
    if context.file.datastates_ckpt is not False and context.wrote("datastates_ckpt"):
        wanted.append((("datastates_ckpt",), "datastates"))  # any value but false turns it on
    if not wanted:
        return
    from importlib.util import find_spec

    for path, package in wanted:
        if find_spec(package) is None:
            message = f"switched on, but the package {package} is not installed here: DeepSpeed raises"
            context.findings.warning(path, message, "install it, or write false", code="not-installed", at_value=True)

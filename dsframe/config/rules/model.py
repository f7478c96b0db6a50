"""Rules about the switches of ``dsframe.model`` and about learning rates for large batches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from dsframe.config.rules.context import RuleContext

_MODEL = ("dsframe", "model")
PER_TENSOR = ("lamb", "muon", "adafactor")
"""Optimizers that compute the update of one element from its full tensor."""


def compiler() -> str | None:
    """Return the C++ compiler that torch.compile would use: $CXX, else one of the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def check(context: RuleContext) -> None:
    """Report what is wrong with the switches and with learning-rate scaling."""
    _recomputation(context)
    _offload(context)
    _pipeline(context)
    _chunks(context)
    _mlps(context)
    _tiling(context)
    _speed(context)
    _accumulation(context)
    _large_batch(context)
    _random_numbers(context)
    _adapter(context)
    _average(context)
    _batch_norm(context)


def _exclude(context: RuleContext, path: tuple[str, ...], excluded: Mapping[str, bool]) -> None:
    """Report what is on and excludes the key at ``path``."""
    for what, on in excluded.items():
        if on:
            context.conflict(path, f"not possible with {what}", "remove one of them")


def _batch_norm(context: RuleContext) -> None:
    file, path = context.file, (*_MODEL, "sync_batch_norm")
    if not file.dsframe.model.sync_batch_norm:
        return
    steps, again = file.gradient_accumulation_steps, bool(file.dsframe.model.activation_checkpointing)
    excluded = {
        "several micro-batches in a step, which have statistics of their own": isinstance(steps, int) and steps > 1,
        "dsframe.model.activation_checkpointing: a block that is recomputed would count twice": again,
        "dsframe.model.compile": bool(file.dsframe.model.compile),
        "a pipeline, whose stages have other layers": context.pipelined,
        "tensor parallelism": context.splits_layers,
        "sequence parallelism": context.splits_sequences,
    }
    _exclude(context, path, excluded)


def _adapter(context: RuleContext) -> None:
    file, path = context.file, ("dsframe", "adapter")
    wanted = file.dsframe.adapter
    if wanted is None:
        return
    others = [key for key in wanted.model_fields_set if key not in ("type", "folder", "base_format")]
    if wanted.folder is not None and others:
        context.conflict((*path, sorted(others)[0]), "the adapter of the folder says it", "remove one of them")
    tiled, stage = file.dsframe.model.tiling is not None, file.zero_optimization.stage
    excluded = {
        "a pipeline, whose stages have layers without the model's names": context.pipelined,
        "tensor parallelism, which replaces the layers": context.splits_layers,
        "dsframe.model.tiling, which replaces the layers": context.by_deepspeed and tiled,
    }
    _exclude(context, path, excluded)
    if wanted.base_format is not None and context.by_deepspeed and stage == 3:
        what = "ZeRO stage 3, which shards parameters as numbers: bitsandbytes keeps scales beside them"
        _exclude(context, (*path, "base_format"), {what: True})


def _average(context: RuleContext) -> None:
    file = context.file
    if file.dsframe.ema is None:
        return
    zero, kind = file.zero_optimization, file.optimizer.type.lower() if file.optimizer else ""
    on_disk = zero.stage == 3 and zero.optimizer_device == "nvme"
    excluded = {
        "LBFGS, whose state is not kept by parameter": kind == "lbfgs",
        "an optimizer on NVMe": context.by_deepspeed and on_disk,
        "ZenFlow, which updates parameters between steps": context.by_deepspeed and zero.zenflow is not None,
    }
    _exclude(context, ("dsframe", "ema"), excluded)


def _random_numbers(context: RuleContext) -> None:
    file, path = context.file, ("dsframe", "per_sample_randomness")
    if not file.dsframe.per_sample_randomness:
        return
    again = bool(file.dsframe.model.activation_checkpointing)
    excluded = {
        "dsframe.model.activation_checkpointing: a block that is recomputed would draw others": again,
        "dsframe.model.compile: a compiled model draws by itself": bool(file.dsframe.model.compile),
        "a pipeline, whose stages see parts of a model": context.pipelined,
        "tensor parallelism, which splits what is drawn": context.splits_layers,
        "sequence parallelism, which splits samples": context.splits_sequences,
    }
    _exclude(context, path, excluded)


def _recomputation(context: RuleContext) -> None:
    wanted = context.file.dsframe.model
    path = (*_MODEL, "activation_checkpointing")
    chosen = wanted.activation_checkpointing
    if not chosen and context.wrote("activation_checkpointing") and context.wrote("dsframe"):
        message = "has no effect: the file recomputes no blocks"
        remedy = 'add "model": {"activation_checkpointing": true} to "dsframe"'
        context.findings.warning(("activation_checkpointing",), message, remedy, code="no-effect")
    cut = context.file.tensor_parallel.autotp_size > 1
    recomputes = chosen and context.by_deepspeed and context.file.has("activation_checkpointing")
    if recomputes and context.file.activation_checkpointing.partition_activations and not cut:
        message = "has no effect without tensor parallelism: each rank has other inputs"
        context.no_effect(("activation_checkpointing", "partition_activations"), message)
    task = context.file.dsframe.task
    if chosen == []:
        context.conflict(path, "the list is empty", "write true, or class names")
    if chosen is True and getattr(task, "name", "") == "vision" and getattr(task, "model", "") == "cnn":
        context.conflict(path, "the small CNN has no repeated block", 'write ["Sequential"], the class of its layers')
    if chosen and wanted.compile is True:
        message = "excludes activation_checkpointing: one graph of the whole model has no blocks to recompute"
        context.conflict((*_MODEL, "compile"), message, 'write "blocks"')


def _offload(context: RuleContext) -> None:
    wanted, path = context.file.dsframe.model, (*_MODEL, "offload_activations")
    if wanted.offload_activations == []:
        context.conflict(path, "the list is empty", "write true, or names of classes or modules")
    if not wanted.offload_activations:
        return
    if wanted.activation_checkpointing:
        message = "not possible with activation_checkpointing: recomputed blocks keep their inputs alone"
        remedy = 'write "activation_checkpointing": {"cpu_checkpointing": true} outside of "dsframe"'
        context.conflict(path, message, f"remove it, and {remedy}")
    _exclude(context, path, {"dsframe.model.compile: torch.compile decides what a block keeps": bool(wanted.compile)})


def _pipeline(context: RuleContext) -> None:
    wanted, pipeline = context.file.dsframe.model, context.file.pipeline
    if "pipeline" in context.entry.supports and pipeline.stages > 1 and wanted.compile is True:
        message = "not possible in a pipeline: no stage has the whole model"
        context.conflict((*_MODEL, "compile"), message, 'write "blocks"')


def _chunks(context: RuleContext) -> None:
    file, path = context.file, (*_MODEL, "loss_chunk_tokens")
    if file.dsframe.model.loss_chunk_tokens is None:
        return
    if context.wrote("dsframe", "task") and file.dsframe.task.name in ("vision", "image-classification"):
        context.conflict(path, "is for language models", "remove it")
    excluded = {
        "a pipeline, whose last stage hands logits to the loss": context.pipelined,
        '"compile": true: the targets come from outside of the graph': file.dsframe.model.compile is True,
    }
    _exclude(context, path, excluded)


def _mlps(context: RuleContext) -> None:
    file, path = context.file, (*_MODEL, "mlp_chunk_tokens")
    if file.dsframe.model.mlp_chunk_tokens is None:
        return
    if context.wrote("dsframe", "task") and file.dsframe.task.name in ("vision", "image-classification", "language"):
        context.conflict(path, "is for language models of transformers", "remove it")
    _exclude(
        context,
        path,
        {"dsframe.model.compile: a compiled block decides what it keeps": bool(file.dsframe.model.compile)},
    )


def _tiling(context: RuleContext) -> None:
    wanted = context.file.dsframe.model.tiling
    path = (*_MODEL, "tiling")
    if wanted is None:
        return
    stage = context.file.zero_optimization.stage
    if not wanted.modules:
        context.conflict((*path, "modules"), "the list is empty", 'write names such as "*.expand"')
    if wanted.in_splits == wanted.out_splits == 1:
        context.no_effect(path, "has no effect: both numbers are 1", 'write for example "out_splits": 4')
    elif stage != 3:
        context.no_effect(path, f"has no effect at stage {stage}: it needs stage 3", "remove it")
    elif context.file.dsframe.model.activation_checkpointing:
        context.no_effect(path, "has no effect inside recomputed blocks: ZeRO-3 gathers all of such a block at once")
    kind = context.file.optimizer.type.lower() if context.file.optimizer else ""
    if kind in PER_TENSOR:
        message = f"{kind.capitalize()} computes each update from the full weight: tiles would train differently"
        context.conflict(path, message, "remove it")


def _speed(context: RuleContext) -> None:
    wanted = context.file.dsframe.model
    if wanted.channels_last and getattr(context.file.dsframe.task, "name", "") == "language":
        message = "affects 2-D convolutions only; a language model has none"
        context.conflict((*_MODEL, "channels_last"), message, "remove it")
    if wanted.compile is True and context.file.zero_optimization.stage == 3:
        message = "slow at stage 3: DeepSpeed gathers parameters module by module, and the graph breaks at each"
        remedy = 'write "blocks": each block is gathered at once and compiled'
        context.findings.warning((*_MODEL, "compile"), message, remedy, code="slow", at_value=True)
    if wanted.compile and compiler() is None:
        message = "torch.compile needs a C++ compiler, which this machine does not have"
        remedy = "install g++, or write false"
        context.findings.warning((*_MODEL, "compile"), message, remedy, code="not-installed", at_value=True)


def _accumulation(context: RuleContext) -> None:
    path, stage = ("dsframe", "deepspeed", "accumulate"), context.file.zero_optimization.stage
    if context.file.dsframe.deepspeed.accumulate == "whole" and stage < 2:
        context.no_effect(path, f"has no effect at stage {stage}, which reduces once a step: it needs stage 2 or 3")


def _large_batch(context: RuleContext) -> None:
    wanted = context.file.dsframe.large_batch
    path = ("dsframe", "large_batch")
    if wanted.lr_scaling == "none":
        for key in ("reference_batch_size", "warmup_steps"):
            if context.wrote(*path, key):
                remedy = 'write "lr_scaling": "linear" or "sqrt"'
                context.no_effect((*path, key), 'has no effect: lr_scaling is "none"', remedy)
        return
    rule = (*path, "lr_scaling")
    if wanted.reference_batch_size is None:
        message = "needs the batch size that the learning rates were tuned for"
        context.findings.error(rule, message, 'add "reference_batch_size"', code="missing")
    if context.file.gradient_allreduce_op == "sum":
        message = 'gradient_allreduce_op "sum" already scales with the number of ranks'
        context.conflict(rule, message, 'write "mean", or "none" here')
    if context.wrote("dsframe", "horovod") and context.file.dsframe.horovod.op == "adasum":
        context.conflict(rule, "not possible with adasum, which replaces learning-rate scaling", 'write "none"')
    scheduler = context.file.scheduler
    if wanted.warmup_steps and scheduler is not None and scheduler.type.startswith("Warmup"):
        message = f"{scheduler.type} warms up as well: the two ramps multiply"
        context.findings.warning((*path, "warmup_steps"), message, "keep one of them", code="schedule", at_value=True)

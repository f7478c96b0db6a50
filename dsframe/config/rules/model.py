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
    steps = file.gradient_accumulation_steps
    excluded = {
        "several micro-batches in a step, which have statistics of their own": isinstance(steps, int) and steps > 1,
        "dsframe.model.activation_checkpointing: a block that is recomputed would count twice": bool(
            file.dsframe.model.activation_checkpointing
        ),
        "dsframe.model.compile": bool(file.dsframe.model.compile),
        "a pipeline, whose stages have other layers": context.by_deepspeed and file.pipeline.stages > 1,
        "tensor parallelism": context.by_deepspeed and file.tensor_parallel.autotp_size > 1,
        "sequence parallelism": context.by_deepspeed and (file.sequence_parallel_size or 1) > 1,
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
    excluded = {
        "a pipeline, whose stages have layers without the model's names": context.by_deepspeed
        and file.pipeline.stages > 1,
        "tensor parallelism, which replaces the layers": context.by_deepspeed and file.tensor_parallel.autotp_size > 1,
        "dsframe.model.tiling, which replaces the layers": context.by_deepspeed
        and file.dsframe.model.tiling is not None,
    }
    _exclude(context, path, excluded)
    if wanted.base_format is not None:
        stage = file.zero_optimization.stage
        sharded = {
            "ZeRO stage 3, which shards parameters as numbers: bitsandbytes keeps scales beside them": context.by_deepspeed
            and stage == 3
        }
        _exclude(context, (*path, "base_format"), sharded)


def _average(context: RuleContext) -> None:
    file = context.file
    if file.dsframe.ema is None:
        return
    excluded = {
        "LBFGS, whose state is not kept by parameter": file.optimizer is not None
        and file.optimizer.type.lower() == "lbfgs",
        "an optimizer on NVMe": context.by_deepspeed
        and file.zero_optimization.stage == 3
        and file.zero_optimization.optimizer_device == "nvme",
        "ZenFlow, which updates parameters between steps": context.by_deepspeed
        and file.zero_optimization.zenflow is not None,
    }
    _exclude(context, ("dsframe", "ema"), excluded)


def _random_numbers(context: RuleContext) -> None:
    file, path = context.file, ("dsframe", "per_sample_randomness")
    if not file.dsframe.per_sample_randomness:
        return
    excluded = {
        "dsframe.model.activation_checkpointing: a block that is recomputed would draw others": bool(
            file.dsframe.model.activation_checkpointing
        ),
        "dsframe.model.compile: a compiled model draws by itself": bool(file.dsframe.model.compile),
        "a pipeline, whose stages see parts of a model": context.by_deepspeed and file.pipeline.stages > 1,
        "tensor parallelism, which splits what is drawn": context.by_deepspeed and file.tensor_parallel.autotp_size > 1,
        "sequence parallelism, which splits samples": context.by_deepspeed and (file.sequence_parallel_size or 1) > 1,
    }
    _exclude(context, path, excluded)


def _recomputation(context: RuleContext) -> None:
    wanted = context.file.dsframe.model
    path = (*_MODEL, "activation_checkpointing")
    chosen = wanted.activation_checkpointing
    if not chosen and context.wrote("activation_checkpointing") and context.wrote("dsframe"):
        context.findings.warning(
            ("activation_checkpointing",), "has no effect: the file recomputes no blocks",
            'add "model": {"activation_checkpointing": true} to "dsframe"', code="no-effect",
        )  # fmt: skip
    cut = context.file.tensor_parallel.autotp_size > 1
    recomputes = chosen and context.by_deepspeed and context.file.has("activation_checkpointing")
    if recomputes and context.file.activation_checkpointing.partition_activations and not cut:
        context.no_effect(
            ("activation_checkpointing", "partition_activations"),
            "has no effect without tensor parallelism: each rank has other inputs",
        )
    task = context.file.dsframe.task
    if chosen == []:
        context.conflict(path, "the list is empty", "write true, or class names")
    if chosen is True and getattr(task, "name", "") == "vision" and getattr(task, "model", "") == "cnn":
        context.conflict(path, "the small CNN has no repeated block", 'write ["Sequential"], the class of its layers')
    if chosen and wanted.compile is True:
        context.conflict(
            (*_MODEL, "compile"), "excludes activation_checkpointing: one graph of the whole model has no blocks to recompute",
            'write "blocks"',
        )  # fmt: skip


def _offload(context: RuleContext) -> None:
    wanted, path = context.file.dsframe.model, (*_MODEL, "offload_activations")
    if wanted.offload_activations == []:
        context.conflict(path, "the list is empty", "write true, or names of classes or modules")
    if not wanted.offload_activations:
        return
    if wanted.activation_checkpointing:
        context.conflict(
            path,
            "not possible with activation_checkpointing: recomputed blocks keep their inputs alone",
            'remove it, and write "activation_checkpointing": {"cpu_checkpointing": true} outside of "dsframe"',
        )
    _exclude(context, path, {"dsframe.model.compile: torch.compile decides what a block keeps": bool(wanted.compile)})


def _pipeline(context: RuleContext) -> None:
    wanted, pipeline = context.file.dsframe.model, context.file.pipeline
    if "pipeline" in context.entry.supports and pipeline.stages > 1 and wanted.compile is True:
        context.conflict(
            (*_MODEL, "compile"), "not possible in a pipeline: no stage has the whole model", 'write "blocks"'
        )


def _chunks(context: RuleContext) -> None:
    file, path = context.file, (*_MODEL, "loss_chunk_tokens")
    if file.dsframe.model.loss_chunk_tokens is None:
        return
    if context.wrote("dsframe", "task") and file.dsframe.task.name in ("vision", "image-classification"):
        context.conflict(path, "is for language models", "remove it")
    excluded = {
        "a pipeline, whose last stage hands logits to the loss": context.by_deepspeed and file.pipeline.stages > 1,
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
        context.conflict(
            path,
            f"{kind.capitalize()} computes each update from the full weight: tiles would train differently",
            "remove it",
        )


def _speed(context: RuleContext) -> None:
    wanted = context.file.dsframe.model
    if wanted.channels_last and getattr(context.file.dsframe.task, "name", "") == "language":
        context.conflict(
            (*_MODEL, "channels_last"), "affects 2-D convolutions only; a language model has none", "remove it"
        )
    if wanted.compile is True and context.file.zero_optimization.stage == 3:
        context.findings.warning(
            (*_MODEL, "compile"), "slow at stage 3: DeepSpeed gathers parameters module by module, and the graph breaks at each",
            'write "blocks": each block is gathered at once and compiled', code="slow", at_value=True,
        )  # fmt: skip
    if wanted.compile and compiler() is None:
        context.findings.warning(
            (*_MODEL, "compile"), "torch.compile needs a C++ compiler, which this machine does not have",
            "install g++, or write false", code="not-installed", at_value=True,
        )  # fmt: skip


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
                context.no_effect(
                    (*path, key), 'has no effect: lr_scaling is "none"', 'write "lr_scaling": "linear" or "sqrt"'
                )
        return
    rule = (*path, "lr_scaling")
    if wanted.reference_batch_size is None:
        context.findings.error(
            rule,
            "needs the batch size that the learning rates were tuned for",
            'add "reference_batch_size"',
            code="missing",
        )
    if context.file.gradient_allreduce_op == "sum":
        context.conflict(
            rule, 'gradient_allreduce_op "sum" already scales with the number of ranks', 'write "mean", or "none" here'
        )
    if context.wrote("dsframe", "horovod") and context.file.dsframe.horovod.op == "adasum":
        context.conflict(rule, "not possible with adasum, which replaces learning-rate scaling", 'write "none"')
    scheduler = context.file.scheduler
    if wanted.warmup_steps and scheduler is not None and scheduler.type.startswith("Warmup"):
        context.findings.warning(
            (*path, "warmup_steps"), f"{scheduler.type} warms up as well: the two ramps multiply",
            "keep one of them", code="schedule", at_value=True,
        )  # fmt: skip

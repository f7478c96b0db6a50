"""Rules about the switches of ``dsframe.model`` and about learning rates for large batches."""

from __future__ import annotations

import os
import shutil

from dsframe.config.rules.context import RuleContext

_MODEL = "dsframe.model"
_BLOCKS = f"{_MODEL}.activation_checkpointing"
_COMPILE = f"{_MODEL}.compile"
_TILING = f"{_MODEL}.tiling"
_LARGE = "dsframe.large_batch"
_EMPTY = "the list is empty"
_NAMES = "write true, or names of classes or modules"


def compiler() -> str | None:
    """Return the C++ compiler that torch.compile would use: $CXX, else one of the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def check(context: RuleContext) -> None:
    """Report what is wrong with the switches and with learning-rate scaling."""
    _recomputation(context)
    _compile(context)
    _tasks(context)
    if context.model.tiling is not None:
        _tiling(context)
    _large_batch(context)
    adapter, stage = context.settings.adapter, context.stage
    if adapter is not None and adapter.folder is not None:
        others = sorted(adapter.model_fields_set - {"type", "folder", "base_format"})
        for key in others[:1]:
            context.conflict(f"dsframe.adapter.{key}", "the adapter of the folder says it", "remove one of them")
    if context.settings.deepspeed.accumulate == "whole" and stage < 2:
        message = f"has no effect at stage {stage}, which reduces once a step: it needs stage 2 or 3"
        context.no_effect("dsframe.deepspeed.accumulate", message)


def _recomputation(context: RuleContext) -> None:
    file, chosen = context.file, context.model.activation_checkpointing
    section = file.activation_checkpointing
    if not chosen and context.wrote("activation_checkpointing") and context.wrote("dsframe"):
        remedy = 'add "model": {"activation_checkpointing": true} to "dsframe"'
        context.no_effect("activation_checkpointing", "has no effect: the file recomputes no blocks", remedy)
    alone = context.by_deepspeed and file.tensor_parallel.autotp_size <= 1
    if chosen and section.partition_activations and alone:
        message = "has no effect without tensor parallelism: each rank has other inputs"
        context.no_effect("activation_checkpointing.partition_activations", message)
    if section.contiguous_memory_optimization and not context.fails("activation_checkpointing"):
        missing = [key for key in ("partition_activations", "number_checkpoints") if not getattr(section, key)]
        if missing:
            message = (
                f"needs {' and '.join(missing)}, in the file or from the program: "
                "else deepspeed.checkpointing.configure raises"
            )
            context.note("activation_checkpointing.contiguous_memory_optimization", message, code="conflict")
    for path, names in ((_BLOCKS, chosen), (f"{_MODEL}.offload_activations", context.model.offload_activations)):
        if names == []:
            context.conflict(path, _EMPTY, _NAMES)
    if chosen is True and context.task == "vision" and getattr(context.settings.task, "model", "") == "cnn":
        message = "the small CNN has no repeated block"
        context.conflict(_BLOCKS, message, 'write ["Sequential"], the class of its layers')


def _compile(context: RuleContext) -> None:
    compile_, stages = context.model.compile, context.file.pipeline.stages
    if compile_ is True:
        if context.model.activation_checkpointing:
            message = "excludes activation_checkpointing: one graph of the whole model has no blocks to recompute"
            context.conflict(_COMPILE, message, 'write "blocks"')
        if "pipeline" in context.entry.supports and stages > 1:
            context.conflict(_COMPILE, "not possible in a pipeline: no stage has the whole model", 'write "blocks"')
        if context.stage == 3:
            message = "slow at stage 3: DeepSpeed gathers parameters module by module, and the graph breaks at each"
            context.warn(_COMPILE, message, 'write "blocks": each block is gathered at once and compiled', code="slow")
    if compile_ and compiler() is None:
        message = "torch.compile needs a C++ compiler, which this machine does not have"
        context.warn(_COMPILE, message, "install g++, or write false", code="not-installed")


def _tasks(context: RuleContext) -> None:
    """Report switches for models of another kind than the task's."""
    images = ("vision", "image-classification")
    for key, others in (
        ("channels_last", ("language",)),
        ("loss_chunk_tokens", images),
        ("mlp_chunk_tokens", (*images, "language")),
    ):
        written = context.wrote("dsframe.task") or key == "channels_last"
        if getattr(context.model, key) and written and context.task in others:
            context.conflict(f"{_MODEL}.{key}", f'is not for a model of the task "{context.task}"')


def _tiling(context: RuleContext) -> None:
    tiling, stage = context.model.tiling, context.stage
    assert tiling is not None
    if not tiling.modules:
        context.conflict(f"{_TILING}.modules", _EMPTY, 'write names such as "*.expand"')
    if tiling.in_splits == tiling.out_splits == 1:
        context.no_effect(_TILING, "has no effect: both numbers are 1", 'write for example "out_splits": 4')
    elif stage != 3:
        context.no_effect(_TILING, f"has no effect at stage {stage}: it needs stage 3")
    elif context.model.activation_checkpointing:
        message = "has no effect inside recomputed blocks: ZeRO-3 gathers all of such a block at once"
        context.no_effect(_TILING, message)


def _large_batch(context: RuleContext) -> None:
    wanted, rule, scheduler = context.settings.large_batch, f"{_LARGE}.lr_scaling", context.file.scheduler
    if wanted.lr_scaling == "none":
        for key in ("reference_batch_size", "warmup_steps"):
            if context.wrote(f"{_LARGE}.{key}"):
                remedy = 'write "lr_scaling": "linear" or "sqrt"'
                context.no_effect(f"{_LARGE}.{key}", 'has no effect: lr_scaling is "none"', remedy)
        return
    if wanted.reference_batch_size is None:
        message = "needs the batch size that the learning rates were tuned for"
        context.findings.error(("dsframe", "large_batch", "lr_scaling"), message, 'add "reference_batch_size"', code="missing")
    if context.file.gradient_allreduce_op == "sum":
        message = 'gradient_allreduce_op "sum" already scales with the number of ranks'
        context.conflict(rule, message, 'write "mean", or "none" here')
    if context.settings.horovod.op == "adasum":
        context.conflict(rule, "not possible with adasum, which replaces learning-rate scaling", 'write "none"')
    if wanted.warmup_steps and scheduler is not None and scheduler.type.startswith("Warmup"):
        message = f"{scheduler.type} warms up as well: the two ramps multiply"
        context.warn(f"{_LARGE}.warmup_steps", message, "keep one of them", code="schedule")

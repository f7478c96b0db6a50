"""Rules about the switches of ``dsframe.model`` and about learning rates for large batches."""

from __future__ import annotations

import os
import shutil

from dsframe.config.rule import Judge

_MODEL = ("dsframe", "model")
PER_TENSOR = ("lamb", "muon", "adafactor")
"""Optimizers whose update of one element depends on the rest of its tensor."""


def compiler() -> str | None:
    """The C++ compiler that torch.compile would take: $CXX, else one of the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def judge(bench: Judge) -> None:
    """Report what is wrong with them."""
    _recomputation(bench)
    _pipeline(bench)
    _copies(bench)
    _tiling(bench)
    _speed(bench)
    _accumulation(bench)
    _large_batch(bench)


def _recomputation(bench: Judge) -> None:
    wanted = bench.file.dsframe.model
    path = (*_MODEL, "activation_checkpointing")
    chosen = wanted.activation_checkpointing
    if not chosen and bench.wrote("activation_checkpointing") and bench.wrote("dsframe"):
        bench.findings.warning(
            ("activation_checkpointing",), "acts on blocks that are recomputed, and the file names none",
            'add "model": {"activation_checkpointing": true} to "dsframe"', code="no-effect",
        )  # fmt: skip
    cut = bench.file.tensor_parallel.autotp_size > 1
    if chosen and bench.by_deepspeed and bench.file.activation_checkpointing.partition_activations and not cut:
        bench.idle(
            ("activation_checkpointing", "partition_activations"),
            "has no effect without tensor_parallel.autotp_size: no two ranks have the same inputs that they could share out",
        )
    task = bench.file.dsframe.task
    if chosen == []:
        bench.conflict(path, "names no class", "write true, or class names")
    if chosen is True and getattr(task, "name", "") == "vision" and getattr(task, "model", "") == "cnn":
        bench.conflict(path, "the small CNN repeats no block", 'write ["Sequential"], which are its layers')
    if chosen and wanted.compile is True:
        bench.conflict(
            (*_MODEL, "compile"), "the whole model as one graph leaves nothing to recompute block by block",
            'write "blocks"',
        )  # fmt: skip


def _pipeline(bench: Judge) -> None:
    wanted, pipeline = bench.file.dsframe.model, bench.file.pipeline
    cuts = bench.by_deepspeed or bench.engine == "reference-model-parallel"
    if cuts and pipeline.stages > 1 and wanted.compile is True:
        bench.conflict((*_MODEL, "compile"), "no stage has the whole model", 'write "blocks"')


def _copies(bench: Judge) -> None:
    """nn.DataParallel copies a module without its methods' owner: a replaced ``forward`` would run the original's weights."""
    settings = bench.file.dsframe
    for key in ("activation_checkpointing", "compile"):
        if bench.engine == "reference-dataparallel" and getattr(settings.model, key):
            bench.conflict((*_MODEL, key), "nn.DataParallel cannot copy such a model", "remove it, or choose ddp")


def _tiling(bench: Judge) -> None:
    wanted = bench.file.dsframe.model.tiling
    path = (*_MODEL, "tiling")
    if wanted is None:
        return
    stage = bench.file.zero_optimization.stage
    if not wanted.modules:
        bench.conflict((*path, "modules"), "names no module", 'write names such as "*.expand"')
    if wanted.in_splits == wanted.out_splits == 1:
        bench.idle(path, "has no effect: one tile is the whole layer", 'write "out_splits": 4, say')
    elif stage != 3:
        bench.idle(path, f"has no effect at stage {stage}: it needs stage 3", "remove it")
    elif bench.file.dsframe.model.activation_checkpointing:
        bench.idle(path, "has no effect inside of blocks that are recomputed: ZeRO-3 gathers such a block as a whole")
    kind = bench.file.optimizer.type.lower() if bench.file.optimizer else ""
    if kind in PER_TENSOR:
        bench.conflict(
            path, f"{kind.capitalize()} looks at a weight as a whole: tiles would train differently", "remove it"
        )


def _speed(bench: Judge) -> None:
    wanted = bench.file.dsframe.model
    if wanted.channels_last and getattr(bench.file.dsframe.task, "name", "") == "language":
        bench.conflict(
            (*_MODEL, "channels_last"), "a language model has no 2-D convolution, whose layout this is", "remove it"
        )
    if wanted.compile is True and bench.file.zero_optimization.stage == 3:
        bench.findings.warning(
            (*_MODEL, "compile"), "at stage 3 DeepSpeed gathers parameters module by module, and the graph breaks at each",
            'write "blocks": each is gathered as a whole and compiled', code="slow", at_value=True,
        )  # fmt: skip
    if wanted.compile and bench.engine == "ddp" and (bench.file.dsframe.ddp.bucket_cap_megabytes or 1) < 1:
        bench.conflict(
            ("dsframe", "ddp", "bucket_cap_megabytes"), "torch.compile wants DDP's buckets to have 1 MiB at least",
            "write 1 or more, or leave out model.compile",
        )  # fmt: skip
    if wanted.compile and compiler() is None:
        bench.findings.warning(
            (*_MODEL, "compile"), "torch.compile needs a C++ compiler, and there is none here",
            "install g++, or write false", code="not-installed", at_value=True,
        )  # fmt: skip


def _accumulation(bench: Judge) -> None:
    path, stage = ("dsframe", "deepspeed", "accumulate"), bench.file.zero_optimization.stage
    if bench.file.dsframe.deepspeed.accumulate == "whole" and stage < 2:
        bench.idle(path, f"has no effect at stage {stage}, which reduces once in a step: it needs stage 2 or 3")


def _large_batch(bench: Judge) -> None:
    wanted = bench.file.dsframe.large_batch
    path = ("dsframe", "large_batch")
    if wanted.lr_scaling == "none":
        for key in ("reference_batch_size", "warmup_steps"):
            if bench.wrote(*path, key):
                bench.idle(
                    (*path, key), 'has no effect: lr_scaling is "none"', 'write "lr_scaling": "linear" or "sqrt"'
                )
        return
    rule = (*path, "lr_scaling")
    if wanted.reference_batch_size is None:
        bench.findings.error(
            rule, "needs the batch size for which the rates were found", 'add "reference_batch_size"', code="missing"
        )
    if bench.file.gradient_allreduce_op == "sum":
        bench.conflict(rule, 'gradient_allreduce_op "sum" scales by the ranks already', 'write "mean", or "none" here')
    if bench.file.dsframe.horovod.op == "adasum":
        bench.conflict(rule, "adasum needs no scaling: it is made to replace it", 'write "none"')
    scheduler = bench.file.scheduler
    if wanted.warmup_steps and scheduler is not None and scheduler.type.startswith("Warmup"):
        bench.findings.warning(
            (*path, "warmup_steps"), f"{scheduler.type} warms up too: the two ramps multiply",
            "keep one of them", code="schedule", at_value=True,
        )  # fmt: skip

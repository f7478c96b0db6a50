"""Rules about ZeRO, offload and the reduction of gradients."""

from __future__ import annotations

from pathlib import Path

from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.zero import Zero

ZERO = "zero_optimization"
_OFFLOAD = f"{ZERO}.offload_optimizer"
_ZENFLOW = f"{ZERO}.zenflow"

_ONLY_STAGE_3 = (
    "sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "leaf_module", "memory_efficient_linear", "save_muon_momentum_buffer_in_memory",
)  # fmt: skip


def check(context: RuleContext) -> None:
    """Report what is wrong with ZeRO, offload and the reduction of gradients."""
    if context.wrote(ZERO):
        _stage(context)
        _raises(context)
        _offload(context)
        _zenflow(context)
    _reduction(context)
    if context.wrote("allgather_size"):
        context.no_effect(
            "allgather_size", 'has no effect: DeepSpeed reads it only if "zero_optimization" is true or false'
        )


def _stage(context: RuleContext) -> None:
    written, stage = context.raw[ZERO], context.stage
    if stage == 3:
        if context.zero.elastic_checkpoint:
            context.no_effect(f"{ZERO}.elastic_checkpoint", "has no effect: no longer supported at stage 3")
        return
    if "stage" not in written and written and not context.findings.mentions(f"{ZERO}.stage"):
        if not context.fails(ZERO):
            message = '"stage" is absent: it is 0, and ZeRO is off'
            context.no_effect(ZERO, message, 'write "stage": 1, 2 or 3')
            return
    for key in written:
        changed = key in _ONLY_STAGE_3 and written[key] != Zero.model_fields[key].default
        if key.startswith("stage3_") or changed:
            context.no_effect(f"{ZERO}.{key}", f"has no effect at stage {stage}", "use stage 3, or remove it")


def _raises(context: RuleContext) -> None:
    zero, stage, offload = context.zero, context.stage, context.zero.offload_optimizer
    clips = context.file.gradient_clipping > 0
    if not zero.compute_grad_norm and (stage not in (1, 2) or clips or context.offloads or zero.zenflow):
        message = "false needs stage 1 or 2, and no clipping (1.0 when absent), offload or ZenFlow: DeepSpeed raises"
        context.conflict(f"{ZERO}.compute_grad_norm", message)
    if zero.legacy_stage1 and stage:
        context.conflict(f"{ZERO}.legacy_stage1", "removed in DeepSpeed 0.5.9: true raises")
    if zero.round_robin_gradients and stage in (1, 2) and context.by_deepspeed:
        message = "is left off: with it DeepSpeed 0.19.8 puts wrong weights into checkpoints; the training is the same"
        context.note(f"{ZERO}.round_robin_gradients", message)
    if offload is not None and offload.ratio < 1.0 and stage != 3:
        context.conflict(f"{_OFFLOAD}.ratio", "below 1.0 is possible at stage 3 only: DeepSpeed raises")
    if offload is not None and offload.super_offload and stage != 3:
        context.no_effect(f"{_OFFLOAD}.super_offload", f"has no effect at stage {stage}", "it needs stage 3")


def _offload(context: RuleContext) -> None:
    stage = context.stage
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        section, path = getattr(context.zero, key), f"{ZERO}.{key}"
        if section is None or section.device == "none" or context.fails(path):
            continue
        nvme, folder = section.device == "nvme", section.nvme_path
        if stage < least:
            need = "stage 3" if least == 3 else "stage 1, 2 or 3"
            context.no_effect(path, f"has no effect at stage {stage}: nothing is offloaded", f"it needs {need}")
        elif nvme and stage < 3:
            message = f'"nvme" has no effect at stage {stage}: DeepSpeed silently offloads to the CPU'
            context.warn(f"{path}.device", message, 'write "cpu", or use stage 3', code="no-effect")
        elif nvme and folder is None:
            message = '"nvme" needs "nvme_path": DeepSpeed raises'
            context.conflict(f"{path}.device", message, "add the folder on the drive")
        elif nvme and folder is not None and not _may_exist(folder):
            message, remedy = f'"{folder}" is not on this machine', "mount the drive, or change the path"
            context.warn(f"{path}.nvme_path", message, remedy, code="nvme-path")
        elif folder is not None and not nvme:
            context.no_effect(f"{path}.nvme_path", f'has no effect while "device" is "{section.device}"')


def _may_exist(path: str) -> bool:
    """Return False if the drive is not mounted: DeepSpeed creates the folder, but not the drive."""
    folder = Path(path)
    try:
        return folder.exists() or (folder.parent.exists() and str(folder.parent) != "/")
    except OSError:
        return False


def _zenflow(context: RuleContext) -> None:
    """Report what ZenFlow needs; what it needs of its own keys DeepSpeed says itself."""
    zero = context.zero
    overlap = zero.overlap_comm if zero.overlap_comm is not None else zero.stage == 3
    if zero.zenflow and zero.stage and not context.fails(_ZENFLOW):
        if not context.offloads:
            message = "needs optimizer offload: DeepSpeed raises"
            context.conflict(_ZENFLOW, message, 'add "offload_optimizer": {"device": "cpu"}')
        if zero.zenflow.offload and not overlap:
            context.conflict(f"{_ZENFLOW}.offload", "needs overlap_comm: DeepSpeed raises", 'add "overlap_comm": true')


def _reduction(context: RuleContext) -> None:
    """Report what ``stage_1_and_2.py`` and ``stage3.py`` assert, and ``runtime/config.py`` about the sum."""
    file, zero, stage = context.file, context.zero, context.stage
    predivided = file.gradient_predivide_factor != 1.0
    if stage >= 2 and zero.reduce_scatter and (file.gradient_allreduce_op == "mean" or stage == 3):
        for key, is_on in (("gradient_predivide_factor", predivided), ("prescale_gradients", file.prescale_gradients)):
            if is_on:
                message = f"not possible with reduce-scatter at stage {stage}: DeepSpeed raises"
                remedy = 'write "reduce_scatter": false under "zero_optimization", or remove it'
                context.conflict(key, message, remedy)
    elif file.prescale_gradients and predivided:
        context.no_effect("gradient_predivide_factor", 'has no effect with "prescale_gradients": true')
    context.conflicts(
        "gradient_allreduce_op", file.gradient_allreduce_op == "sum",
        ((stage == 3, '"sum" is not possible with ZeRO stage 3: DeepSpeed raises'),
         (zero.zenflow, '"sum" is not possible with ZenFlow: DeepSpeed raises')),
        'write "mean"',
    )  # fmt: skip
    context.conflicts(
        "managed_gradient_accumulation", not file.managed_gradient_accumulation,
        ((zero.overlap_comm and stage < 2, "false with overlap_comm needs stage 2: DeepSpeed raises"),
         (file.pipeline.stages > 1, "false is not possible with a pipeline: DeepSpeed raises")),
    )  # fmt: skip

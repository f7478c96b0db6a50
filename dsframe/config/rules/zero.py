"""Rules about ZeRO and offload."""

from __future__ import annotations

from pathlib import Path

from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.zero import Zero

ZERO = "zero_optimization"

_ONLY_STAGE_3 = (
    "sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "leaf_module", "memory_efficient_linear", "save_muon_momentum_buffer_in_memory",
)  # fmt: skip


def check(context: RuleContext) -> None:
    """Report keys of ZeRO without effect, and drives that are not there."""
    if context.wrote(ZERO):
        _stage(context)
        _offload(context)


def _stage(context: RuleContext) -> None:
    written, stage = context.raw[ZERO], context.stage
    if stage == 3:
        return
    reported = context.findings.mentions(f"{ZERO}.stage") or context.fails(ZERO)
    if "stage" not in written and written and not reported:
        context.no_effect(ZERO, '"stage" is absent: it is 0, and ZeRO is off', 'write "stage": 1, 2 or 3')
        return
    for key in written:
        changed = key in _ONLY_STAGE_3 and written[key] != Zero.model_fields[key].default
        if key.startswith("stage3_") or changed:
            context.no_effect(f"{ZERO}.{key}", f"has no effect at stage {stage}", "use stage 3, or remove it")


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

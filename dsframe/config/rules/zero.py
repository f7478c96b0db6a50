"""Rules about ZeRO and offload."""

from __future__ import annotations

from pathlib import Path

from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.zero import Zero

ZERO = "zero_optimization"

_ONLY_STAGE_3 = (
    "sub_group_size", "leaf_module", "memory_efficient_linear", "save_muon_momentum_buffer_in_memory",
)  # fmt: skip


def check(context: RuleContext) -> None:
    """Reports ZeRO keys without effect, and missing drives."""
    if context.wrote(ZERO):
        _stage(context)
        _drives(context)


def _stage(context: RuleContext) -> None:
    written, stage = context.raw[ZERO], context.stage
    if stage == 3:
        return
    reported = context.fails(ZERO) or any(problem.path == f"{ZERO}.stage" for problem in context.findings.problems)
    if "stage" not in written and written and not reported:
        context.no_effect(ZERO, '"stage" is absent: it is 0, and ZeRO is off', 'write "stage": 1, 2 or 3')
        return
    for key in written:
        changed = key in _ONLY_STAGE_3 and written[key] != Zero.model_fields[key].default
        if key.startswith("stage3_") or changed:
            context.no_effect(f"{ZERO}.{key}", f"has no effect at stage {stage}", "use stage 3, or remove it")


def _drives(context: RuleContext) -> None:
    for key in ("offload_optimizer", "offload_param"):
        section, path = getattr(context.zero, key), f"{ZERO}.{key}.nvme_path"
        on_drive = context.stage == 3 and section is not None and section.device == "nvme" and section.nvme_path
        if on_drive and not _may_exist(section.nvme_path):
            message, remedy = f'"{section.nvme_path}" is not on this machine', "mount the drive, or change the path"
            context.warn(path, message, remedy, code="nvme-path")


def _may_exist(path: str) -> bool:
    """Returns False if the drive is not mounted: DeepSpeed creates the folder, but not the drive."""
    folder = Path(path)
    try:
        return folder.exists() or (folder.parent.exists() and str(folder.parent) != "/")
    except OSError:
        return False

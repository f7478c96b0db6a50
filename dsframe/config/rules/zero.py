"""Rules about ZeRO, offload and how the model is split."""

from __future__ import annotations

import re
from pathlib import Path

from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.zero import Zero

ZERO = "zero_optimization"

_ONLY_STAGE_3 = (
    "sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "leaf_module", "memory_efficient_linear", "save_muon_momentum_buffer_in_memory",
)  # fmt: skip


def check(context: RuleContext) -> None:
    """Report what is wrong with ZeRO, offload, pipeline and tensor parallelism."""
    if context.wrote(ZERO):
        _stage(context)
        _raises(context)
        _offload(context)
        _zenflow(context)
    _reduction(context)
    _split(context)
    if context.file.has("compile"):
        _compile(context)
    if context.wrote("allgather_size"):
        message = 'has no effect: DeepSpeed reads it only if "zero_optimization" is true or false'
        context.no_effect(("allgather_size",), message)


def _stage(context: RuleContext) -> None:
    zero = context.file.zero_optimization
    written = context.raw[ZERO]
    stage = zero.stage
    asked = any(problem.path == f"{ZERO}.stage" for problem in context.findings.problems)
    if "stage" not in written and written and not asked and not context.findings.fails((ZERO,)):
        message = '"stage" is absent: it is 0, and ZeRO is off'
        context.findings.warning((ZERO,), message, 'write "stage": 1, 2 or 3', code="no-effect")
        return
    if stage == 3:
        if zero.elastic_checkpoint:
            message = "has no effect: no longer supported at stage 3"
            context.no_effect((ZERO, "elastic_checkpoint"), message, "use a Universal checkpoint")
        return
    for key in written:
        default = Zero.model_fields[key].default if key in _ONLY_STAGE_3 else ...
        if key.startswith("stage3_") or (key in _ONLY_STAGE_3 and written[key] != default):
            context.no_effect((ZERO, key), f"has no effect at stage {stage}", "use stage 3, or remove it")


def _raises(context: RuleContext) -> None:
    zero = context.file.zero_optimization
    if zero.legacy_stage1 and zero.stage:
        context.conflict((ZERO, "legacy_stage1"), "removed in DeepSpeed 0.5.9: true raises", "remove it")
    if not zero.compute_grad_norm:
        path = (ZERO, "compute_grad_norm")
        if zero.stage not in (1, 2):
            message = f"false is not possible at stage {zero.stage}: DeepSpeed raises"
            context.conflict(path, message, "it needs stage 1 or 2")
        elif context.file.gradient_clipping > 0:
            now = "" if "gradient_clipping" in context.raw else ", which is 1.0 when absent"
            message = f"false is not possible with gradient_clipping{now}: DeepSpeed raises"
            context.conflict(path, message, 'write "gradient_clipping": 0')
        elif zero.optimizer_device != "none":
            message = "false is not possible with offload_optimizer: DeepSpeed raises"
            context.conflict(path, message, "remove one of them")
        elif zero.zenflow is not None:
            context.conflict(path, "false is not possible with ZenFlow: DeepSpeed raises", "remove one of them")
    if zero.round_robin_gradients and zero.stage in (1, 2) and context.by_deepspeed:
        message = "is left off: with it DeepSpeed 0.19.8 puts wrong weights into checkpoints; the training is the same"
        context.findings.note((ZERO, "round_robin_gradients"), message, code="no-effect")
    offload = zero.offload_optimizer
    if offload is not None and offload.ratio < 1.0 and zero.stage != 3:
        message = "below 1.0 is possible at stage 3 only: DeepSpeed raises"
        context.conflict((ZERO, "offload_optimizer", "ratio"), message, "remove it")


def _offload(context: RuleContext) -> None:
    zero = context.file.zero_optimization
    stage = zero.stage
    for key, device, path_on_drive, least in (
        ("offload_optimizer", zero.optimizer_device, zero.offload_optimizer and zero.offload_optimizer.nvme_path, 1),
        ("offload_param", zero.parameter_device, zero.offload_param and zero.offload_param.nvme_path, 3),
    ):
        where = (ZERO, key)
        if device == "none" or context.findings.fails(where):
            continue
        if stage < least:
            need = "stage 3" if least == 3 else "stage 1, 2 or 3"
            context.no_effect(where, f"has no effect at stage {stage}: nothing is offloaded", f"it needs {need}")
        elif device == "nvme" and stage < 3:
            message = f'"nvme" has no effect at stage {stage}: DeepSpeed silently offloads to the CPU'
            remedy = 'write "cpu", or use stage 3'
            context.findings.warning((*where, "device"), message, remedy, code="no-effect", at_value=True)
        elif device == "nvme" and path_on_drive is None:
            message = '"nvme" needs "nvme_path": DeepSpeed raises'
            context.conflict((*where, "device"), message, "add the folder on the drive")
        elif device == "nvme" and isinstance(path_on_drive, str) and not _may_exist(path_on_drive):
            message, remedy = f'"{path_on_drive}" is not on this machine', "mount the drive, or change the path"
            context.findings.warning((*where, "nvme_path"), message, remedy, code="nvme-path", at_value=True)
        if device != "nvme" and path_on_drive is not None and stage >= least:
            context.no_effect((*where, "nvme_path"), f'has no effect while "device" is "{device}"')
    if zero.offload_optimizer is not None and zero.offload_optimizer.super_offload and stage != 3:
        message = f"has no effect at stage {stage}"
        context.no_effect((ZERO, "offload_optimizer", "super_offload"), message, "it needs stage 3")


def _may_exist(path: str) -> bool:
    """Return False if the drive is not mounted: DeepSpeed creates the folder, but not the drive."""
    folder = Path(path)
    try:
        return folder.exists() or (folder.parent.exists() and str(folder.parent) != "/")
    except OSError:
        return False


def _zenflow(context: RuleContext) -> None:
    zero = context.file.zero_optimization
    zenflow = zero.zenflow
    if zenflow is None or not zero.stage or context.findings.fails((ZERO, "zenflow")):
        return
    path = (ZERO, "zenflow")
    if zero.optimizer_device == "none":
        message = "needs optimizer offload: DeepSpeed raises"
        context.conflict(path, message, 'add "offload_optimizer": {"device": "cpu"}')
    overlap = zero.overlap_comm if zero.overlap_comm is not None else zero.stage == 3
    if zenflow.offload and not overlap:
        context.conflict((*path, "offload"), "needs overlap_comm: DeepSpeed raises", 'add "overlap_comm": true')
    select, update = zenflow.select_interval, zenflow.update_interval
    if zenflow.select_strategy != "auto" and select == "auto":
        what = f'select_strategy "{zenflow.select_strategy}"'
        context.conflict((*path, "select_strategy"), f"{what} needs a number in select_interval", "write one")
    if isinstance(select, int) and isinstance(update, int) and select < update and zenflow.select_strategy == "step":
        context.conflict((*path, "select_interval"), f"{select} is less than update_interval {update}", "raise it")


def _reduction(context: RuleContext) -> None:
    """Report what ``stage_1_and_2.py`` and ``stage3.py`` assert, and ``runtime/config.py`` about the sum."""
    file = context.file
    zero = file.zero_optimization
    deepcompile = file.has("compile") and file.compile.deepcompile
    scattered = zero.stage >= 2 and zero.reduce_scatter
    averaged = file.gradient_allreduce_op == "mean" or zero.stage == 3
    if scattered and averaged:
        remedy = 'write "reduce_scatter": false under "zero_optimization", or remove it'
        if file.gradient_predivide_factor != 1.0:
            where = f"not possible with reduce-scatter at stage {zero.stage}: DeepSpeed raises"
            context.conflict(("gradient_predivide_factor",), where, remedy)
        if file.prescale_gradients:
            where = f"true is not possible with reduce-scatter at stage {zero.stage}: DeepSpeed raises"
            context.conflict(("prescale_gradients",), where, remedy)
    elif file.prescale_gradients and file.gradient_predivide_factor != 1.0:
        context.no_effect(("gradient_predivide_factor",), 'has no effect with "prescale_gradients": true')
    if file.gradient_allreduce_op == "sum":
        path = ("gradient_allreduce_op",)
        for on, what in (
            (zero.stage == 3, "ZeRO stage 3"),
            (zero.zenflow is not None, "ZenFlow"),
            (deepcompile, "DeepCompile"),
        ):
            if on:
                context.conflict(path, f'"sum" is not possible with {what}: DeepSpeed raises', 'write "mean"')
    if not file.managed_gradient_accumulation:
        path = ("managed_gradient_accumulation",)
        if zero.overlap_comm and zero.stage < 2:
            message = "false with overlap_comm needs stage 2: DeepSpeed raises"
            context.conflict(path, message, "set overlap_comm to false")
        for on, what in ((file.pipeline.stages > 1, "a pipeline"), (deepcompile, "DeepCompile")):
            if on:
                context.conflict(path, f"false is not possible with {what}: DeepSpeed raises", "remove it")


def _split(context: RuleContext) -> None:
    file = context.file
    zero, tensor = file.zero_optimization, file.tensor_parallel
    if file.pipeline.stages > 1 and zero.stage >= 2:
        message = f"{zero.stage} is not possible with a pipeline: DeepSpeed raises"
        context.conflict((ZERO, "stage") if context.wrote(ZERO, "stage") else (ZERO,), message, "use stage 0 or 1")
    partition = file.pipeline.partition
    if partition not in ("parameters", "uniform", "best") and not partition.lower().startswith("type:"):
        message = f'"{partition}" is not a method of partitioning'
        context.conflict(("pipeline", "partition"), message, 'write "parameters", "uniform" or "type:REGEX"')
    elif partition.lower().startswith("type:"):
        try:
            re.compile(partition.partition(":")[2])
        except re.error as error:
            message = f'"{partition}" is not a regular expression: {error}'
            context.conflict(("pipeline", "partition"), message, "correct it")
    if tensor.tp.tp_size not in (1, max(1, tensor.autotp_size)):
        message = f"{tensor.tp.tp_size} != autotp_size {tensor.autotp_size}: DeepSpeed raises"
        context.conflict(("tensor_parallel", "tp", "tp_size"), message, "remove it")
    if tensor.preset_model is not None and tensor.preset_model.lower() not in _PRESETS:
        message = f'"{tensor.preset_model}" is not a preset: DeepSpeed ignores it'
        context.conflict(("tensor_parallel", "preset_model"), message, f"choose one of {', '.join(_PRESETS)}")


_PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")


def _compile(context: RuleContext) -> None:
    compile_ = context.file.compile
    if compile_.offload_activation and (compile_.offload_parameters or compile_.offload_opt_states):
        other = "offload_parameters" if compile_.offload_parameters else "offload_opt_states"
        context.conflict(("compile", "offload_activation"), f"excludes {other}: DeepSpeed raises", "remove one of them")
    elif compile_.offload_parameters and compile_.offload_opt_states:
        message = "excludes offload_opt_states: DeepSpeed raises"
        context.conflict(("compile", "offload_parameters"), message, "remove one of them")
    if compile_.autoep_non_moe and compile_.deepcompile:
        context.conflict(("compile", "autoep_non_moe"), "excludes deepcompile: DeepSpeed raises", "remove one of them")
    if compile_.deepcompile and context.file.zero_optimization.stage == 0 and not compile_.passes:
        context.no_effect(("compile", "deepcompile"), "has no effect without ZeRO", "it needs stage 1, 2 or 3")

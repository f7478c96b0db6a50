"""Rules about the optimizer and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterable

from dsframe.config.features import makes_groups, own_adam
from dsframe.config.read.findings import show
from dsframe.config.read.reader import Path, Raw
from dsframe.config.read.suggest import did_you_mean
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.optimizer import OF_TASK, SPELLINGS, muon_rates
from dsframe.config.schema.parameters import (
    DEEPSPEED_OPTIMIZERS,
    DEEPSPEED_SCHEDULERS,
    HF_SCHEDULERS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    WITHOUT_ROUTE,
)
from dsframe.config.schema.scheduler import Scheduler

_TYPE = "optimizer.type"
_PARAMS = "optimizer.params"
_SCHEDULE = "scheduler.params"
_OWN_RATES = frozenset({"WarmupDecayLR", "OneCycleLR", "CyclicLR"})
"""Schedules that replace the optimizer's rate."""
_A_RATE = ("warmup_min_lr", "warmup_max_lr", "eta_min")
"""Keys with which the other schedules set a rate."""


def check(context: RuleContext) -> None:
    """Reports what is wrong with the optimizer, the parameter groups and the schedule."""
    if context.optimizer:
        _optimizer(context)
    _groups(context)
    if context.file.scheduler is not None:
        _scheduler(context, context.file.scheduler)


def _unknown(context: RuleContext, path: str, name: str, known: Iterable[str], library: str) -> None:
    reasons = WITHOUT_ROUTE[path]
    message, remedy = f"{show(name)} is neither in DeepSpeed nor in {library}", ""
    if reason := reasons.get(name) or reasons.get(name.lower()):
        message = f"{show(name)} cannot be used: {reason}"
    else:
        same = next((other for other in known if other.lower() == name.lower()), None)
        remedy = f'did you mean "{same}"?' if same else did_you_mean(name, known, 3)
    context.findings.error(path, message, remedy, code="value", at_value=True)


def _optimizer(context: RuleContext) -> None:
    assert context.file.optimizer is not None
    name = context.file.optimizer.type
    if ":" in name or name == OF_TASK:
        context.imports(_TYPE, name)
        _custom(context)
        return
    if context.optimizer not in DEEPSPEED_OPTIMIZERS and name not in TORCH_OPTIMIZERS:
        _unknown(context, _TYPE, name, [*SPELLINGS, *TORCH_OPTIMIZERS], "torch.optim")
        return
    if context.optimizer in ("adam", "adamw"):
        _adam(context)
    untested = context.optimizer not in (*DEEPSPEED_OPTIMIZERS, "adafactor")  # which the table of rules refuses
    if untested and context.by_deepspeed and context.stage and not context.file.zero_allow_untested_optimizer:
        message = f"{name} is untested with ZeRO: DeepSpeed raises"
        context.conflict(_TYPE, message, 'add "zero_allow_untested_optimizer": true')


def _custom(context: RuleContext) -> None:
    """Reports combinations in which DeepSpeed cannot take a custom optimizer."""
    file, stage = context.file, context.stage
    allowed = 'unless the update of each number depends on it only: then add "zero_allow_untested_optimizer": true'
    for wrong, where in (
        (stage and not file.zero_allow_untested_optimizer, f"with shards, {allowed}"),
        (context.offloads, "with optimizer offload, for which DeepSpeed has its own"),
        (file.pipeline.stages > 1 or file.tensor_parallel.autotp_size > 1, "where ranks split a model"),
        (context.half == "fp16" or (context.half and not stage), "in fp16, or in bf16 without ZeRO"),
    ):
        if wrong and context.by_deepspeed:
            message = f"an optimizer of your own is not possible with DeepSpeed {where}"
            context.conflict(_TYPE, message, "choose another optimizer, or remove the other key")


def _adam(context: RuleContext) -> None:
    """Reports arguments of DeepSpeed's Adam that other engines or the CPU Adam lack."""
    if not own_adam(context.file):
        return
    if context.params.get("bias_correction") is False and not context.by_deepspeed:
        message = f"torch's Adam, which engine {context.engine} uses, always corrects the bias"
        context.conflict(f"{_PARAMS}.bias_correction", message, 'remove it, or use engine "deepspeed"')
    if "set_grad_none" in context.params and context.offloads:
        message = "not an argument of DeepSpeed's CPU Adam, which raises"
        context.conflict(f"{_PARAMS}.set_grad_none", message)


def _groups(context: RuleContext) -> None:
    groups, decays = context.settings.parameter_groups, context.settings.no_decay != "none"
    for index, group in enumerate(groups):
        if group.contradiction:
            context.conflict(("dsframe", "parameter_groups", index), *group.contradiction)
    path = "dsframe.no_decay" if decays else "dsframe.parameter_groups"
    library = makes_groups(context.file) if context.by_deepspeed else ""
    if library and (decays or not all(group.freeze for group in groups)):
        message = f"not possible with {library}, for which DeepSpeed makes the groups of parameters"
        context.conflict(path, message, "remove one of them")
    weight_decay = context.params.get("weight_decay") or any(group.weight_decay for group in groups)
    by_torch = context.params.get("torch_adam") is True
    if decays and context.optimizer in ("adam", "adamw") and not weight_decay and not by_torch:
        message = "has no effect: the optimizer's weight_decay is 0"
        context.no_effect(path, message, "write it under optimizer.params")


def _scheduler(context: RuleContext, scheduler: Scheduler) -> None:
    name, params = scheduler.type, scheduler.params
    known = [*DEEPSPEED_SCHEDULERS, *TORCH_SCHEDULERS]
    if name not in known and not (name in HF_SCHEDULERS and "dsframe" in context.raw):
        _unknown(context, "scheduler.type", name, known, "torch.optim.lr_scheduler")
        return
    if "params" not in context.raw["scheduler"] and not context.fails("scheduler"):
        message = '"params" is required: DeepSpeed raises'
        context.findings.error(("scheduler",), message, 'add "params": {}', code="missing")
    _parts(context, params, ("scheduler", "params"))
    _rates(context, scheduler)
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps", 1000)
    if isinstance(total, int) and isinstance(warmup, int) and total < warmup:
        written = "warmup_num_steps" in params
        default = "" if written else ", its default"
        message = f"total_num_steps {total} is less than warmup_num_steps {warmup}{default}"
        key = "warmup_num_steps" if written else "total_num_steps"
        remedy = "raise the first or lower the second"
        context.warn(f"{_SCHEDULE}.{key}", f"{message}: training ends during the warm-up", remedy, code="schedule")


def _parts(context: RuleContext, params: Raw, path: Path) -> None:
    """Reports nested schedules that are not torch's, and code that they run."""
    context.imports((*path, "lr_lambda"), params.get("lr_lambda"))
    parts = params.get("schedulers")
    for index, part in enumerate(parts if isinstance(parts, list) else ()):
        if not isinstance(part, dict):
            continue  # reported with its type
        name, part_path = part.get("type"), (*path, "schedulers", index)
        if isinstance(name, str) and name not in TORCH_SCHEDULERS:
            remedy = did_you_mean(name, TORCH_SCHEDULERS, 3, "choose one of torch's")
            message = f"{show(name)} is not in torch.optim.lr_scheduler, as each part must be"
            context.findings.error((*part_path, "type"), message, remedy, code="value", at_value=True)
        if isinstance(part.get("params"), dict):
            _parts(context, part["params"], (*part_path, "params"))


def _rates(context: RuleContext, scheduler: Scheduler) -> None:
    """Reports a schedule with one rate if the parameters have different rates.

    dsframe's schedules have one rate, which all parameter groups follow in proportion.
    """
    params = scheduler.params
    for key, value in params.items():
        if isinstance(value, list) and len(value) != 1 and key not in ("milestones", "schedulers"):
            message = f"{len(value)} rates, but the schedule has one for all parameters"
            context.conflict(f"{_SCHEDULE}.{key}", message, "write one number")
    if not (scheduler.type in _OWN_RATES or any(params.get(key) for key in _A_RATE)):
        return
    message, remedy = f"{scheduler.type} sets one rate for all parameters here, but", "choose WarmupCosineLR"
    if context.optimizer == "muon":
        muon, adam = muon_rates(context.params)
        if muon != adam:
            message = f"{message} Muon's two halves have {muon:g} and {adam:g}"
            context.conflict("scheduler.type", message, f'write one "lr" under "optimizer", or {remedy}')

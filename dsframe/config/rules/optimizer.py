"""Rules about the optimizer and the schedule of its rates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsframe.config.features import makes_groups, needs_cpu_adam, own_adam
from dsframe.config.read.findings import show
from dsframe.config.read.reader import Path
from dsframe.config.read.suggest import closest, did_you_mean
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.optimizer import (
    DEEPSPEED_OPTIMIZERS,
    MUP,
    OF_TASK,
    SPELLINGS,
    TORCH_OPTIMIZERS,
    WITHOUT_ROUTE,
    Optimizer,
    muon_rates,
)
from dsframe.config.schema.scheduler import (
    DEEPSPEED_SCHEDULERS,
    HF_SCHEDULERS,
    SCHEDULERS_WITHOUT_ROUTE,
    TORCH_SCHEDULERS,
    Scheduler,
)

_TORCH_ADAM_ONLY = ("foreach", "maximize", "fused", "capturable", "differentiable")
_DEEPSPEED_ADAM_ONLY = ("bias_correction", "set_grad_none")
_OWN_RATES = frozenset({"WarmupDecayLR", "LRRangeTest", "OneCycle", "OneCycleLR", "CyclicLR"})
"""Schedules with rates of their own, which replace the optimizer's."""
_A_RATE = ("warmup_min_lr", "warmup_max_lr", "eta_min")
"""Keys with which the other schedules set rates of their own."""


def check(context: RuleContext) -> None:
    """Report what is wrong with the optimizer, the groups of its parameters and the schedule."""
    _optimizer(context)
    _groups(context)
    _scheduler(context)


def _unknown_name(
    context: RuleContext, section: str, name: str, known: Iterable[str], excluded: dict[str, str], torch_home: str
) -> None:
    path = (section, "type")
    reason = excluded.get(name) or excluded.get(name.lower())
    if reason:
        context.findings.error(path, f"{show(name)} cannot be used: {reason}", code="value", at_value=True)
        return
    similar = next((other for other in known if other.lower() == name.lower()), None) or closest(name, known, 3)
    remedy = f'did you mean "{similar}"?' if similar else ""
    message = f"{show(name)} is neither in DeepSpeed nor in {torch_home}"
    context.findings.error(path, message, remedy, code="value", at_value=True)


def _optimizer(context: RuleContext) -> None:
    optimizer = context.file.optimizer
    if optimizer is None:
        return
    name = optimizer.type
    if ":" in name or name == OF_TASK:
        context.imports(("optimizer", "type"), name)
        _own(context)
        return
    if name.lower() not in DEEPSPEED_OPTIMIZERS and name not in TORCH_OPTIMIZERS:
        known = [*SPELLINGS, *TORCH_OPTIMIZERS]
        _unknown_name(context, "optimizer", name, known, dict(WITHOUT_ROUTE), "torch.optim")
        return
    kind, stage = name.lower(), context.file.zero_optimization.stage
    if kind in ("adam", "adamw"):
        _adam(context)
    _cpu_adam(context, optimizer)
    if kind == "muon" and stage == 3 and context.file.zero_optimization.reduce_scatter:
        message = "Muon at stage 3 is not possible with reduce-scatter: DeepSpeed raises"
        context.conflict(("optimizer", "type"), message, 'write "reduce_scatter": false under "zero_optimization"')
    stays = context.file.zero_optimization.optimizer_device == "none"
    if kind == "muon" and stage in (1, 2) and stays and context.by_deepspeed:
        remedy = 'write "stage": 3 and "reduce_scatter": false under "zero_optimization", or offload the optimizer to the CPU'
        context.conflict(("optimizer", "type"), "dsframe cannot save Muon's momentum at stages 1 and 2", remedy)
    if kind == "lamb" and context.file.fp16.loss_scale != 0:
        message = "Lamb needs dynamic loss scaling: DeepSpeed raises"
        context.conflict(("optimizer", "type"), message, 'write "loss_scale": 0')
    untested = kind in ("lamb", *MUP) or (kind not in DEEPSPEED_OPTIMIZERS)
    if kind == "adafactor" and stage and context.by_deepspeed:
        message = "not possible with ZeRO, which flattens matrices, so Adafactor would compute other updates"
        context.conflict(("optimizer", "type"), message, "set the stage to 0, or choose another optimizer")
    elif stage and untested and not context.file.zero_allow_untested_optimizer:
        message = f"{name} is untested with ZeRO: DeepSpeed raises"
        context.conflict(("optimizer", "type"), message, 'add "zero_allow_untested_optimizer": true')
    if kind == "lbfgs":
        _lbfgs(context)
    params = optimizer.params
    if kind == "sgd" and params.get("nesterov") is True and (not params.get("momentum") or params.get("dampening")):
        path = ("optimizer", "params", "nesterov")
        context.conflict(path, "needs momentum above 0 and dampening 0: torch raises", "set both")


def _own(context: RuleContext) -> None:
    """Report where DeepSpeed cannot take an optimizer of the user's own."""
    file, zero = context.file, context.file.zero_optimization
    found = (
        (zero.stage and not file.zero_allow_untested_optimizer, "with shards, unless the update of each number depends on it alone",
         'add "zero_allow_untested_optimizer": true if it does, or set the stage to 0'),
        (zero.optimizer_device != "none", "with optimizer offload, for which DeepSpeed has its own", "remove the offload"),
        (file.pipeline.stages > 1 or file.tensor_parallel.autotp_size > 1, "where ranks split a model", "choose another"),
        (file.fp16.enabled is True or (file.bf16.enabled and not zero.stage), "in these 16 bits", "use fp32, or bf16 with ZeRO"),
    )  # fmt: skip
    for wrong, where, remedy in found if context.by_deepspeed else ():
        if wrong:
            message = f"an optimizer of your own is not possible with DeepSpeed {where}"
            context.conflict(("optimizer", "type"), message, remedy)


def _lbfgs(context: RuleContext) -> None:
    """Report what evaluating one batch several times excludes."""
    file, settings = context.file, context.file.dsframe
    if context.by_deepspeed and settings.engine == "auto":  # named, it is refused as what it does not support
        remedy = 'write "engine": "ddp", "horovod" or "single" in the "dsframe" section'
        context.conflict(("optimizer", "type"), "LBFGS evaluates a batch several times, which DeepSpeed cannot", remedy)
    found = (
        (settings.per_sample_randomness, ("dsframe", "per_sample_randomness"), "which draws once for each batch"),
        (settings.on_nonfinite == "skip", ("dsframe", "on_nonfinite"), "whose updates cannot be left out"),
        (file.fp16.enabled is True, ("fp16", "enabled"), "whose search along a line knows no loss scale"),
        (file.torch_autocast.dtype == "float16", ("torch_autocast", "dtype"), "whose search knows no loss scale"),
        (file.gradient_allreduce_op == "sum", ("gradient_allreduce_op",), "which needs the gradient of the mean loss"),
        (settings.ddp.communication == "power_sgd", ("dsframe", "ddp", "communication"), "which needs exact gradients"),
        (settings.horovod.op == "adasum", ("dsframe", "horovod", "op"), "which needs the gradient of the mean loss"),
        (settings.horovod.op == "sum", ("dsframe", "horovod", "op"), "which needs the gradient of the mean loss"),
    )
    for wrong, path, why in found:
        if wrong:
            context.conflict(path, f"not possible with LBFGS, {why}", "remove it, or choose another optimizer")


def _adam(context: RuleContext) -> None:
    """Report arguments that the chosen Adam does not have: FusedAdam, CPUAdam and torch's AdamW differ."""
    params = context.file.optimizer.params if context.file.optimizer else {}
    torch_adam = params.get("torch_adam") is True
    path = ("optimizer", "params")
    own, on_cpu = own_adam(context.file), context.file.zero_optimization.optimizer_device != "none"
    if params.get("bias_correction") is False and own and not context.by_deepspeed:
        message = f"torch's Adam, which engine {context.engine} uses, always corrects the bias"
        context.conflict((*path, "bias_correction"), message, 'remove it, or use engine "deepspeed"')
    if "set_grad_none" in params and own and on_cpu:
        context.conflict((*path, "set_grad_none"), "not an argument of DeepSpeed's CPU Adam, which raises", "remove it")
    if not torch_adam:
        for key in _TORCH_ADAM_ONLY:
            if key in params:
                message = "an argument of torch's Adam only: DeepSpeed's Adam raises"
                context.conflict((*path, key), message, 'add "torch_adam": true')
        if params.get("amsgrad") is True:
            message = "not supported by DeepSpeed's Adam, which raises"
            context.conflict((*path, "amsgrad"), message, 'add "torch_adam": true')
        return
    for key in _DEEPSPEED_ADAM_ONLY:
        if key in params:
            message = 'not an argument of torch\'s Adam: "torch_adam": true raises'
            context.conflict((*path, key), message, "remove one of them")


def _cpu_adam(context: RuleContext, optimizer: Optimizer) -> None:
    """Report keys that work only with DeepSpeed's CPU Adam; ZenFlow works with Muon too."""
    path, kind = needs_cpu_adam(context.file), optimizer.type.lower()
    if path is None or not context.by_deepspeed or (kind == "muon" and path[-1] == "zenflow"):
        return
    adam = kind in ("adam", "adamw")
    if not adam or optimizer.params.get("torch_adam") is True:
        given, remedy = ("torch's", 'remove "torch_adam"') if adam else (optimizer.type, 'write "type": "AdamW"')
        message = f"needs DeepSpeed's CPU Adam, but the optimizer is {given}: DeepSpeed raises"
        context.conflict(path, message, f'{remedy} under "optimizer"')


def _groups(context: RuleContext) -> None:
    settings, file = context.file.dsframe, context.file
    path: tuple[str | int, ...] = ("dsframe", "parameter_groups")
    for index, group in enumerate(settings.parameter_groups):
        if group.contradiction:
            context.findings.error((*path, index), *group.contradiction, code="conflict")
    decays = settings.no_decay != "none"
    who = makes_groups(file) if context.by_deepspeed else ""
    if who and (decays or not all(group.freeze for group in settings.parameter_groups)):
        where = ("dsframe", "no_decay") if decays else ("dsframe", "parameter_groups")
        message = f"not possible with {who}, for which DeepSpeed makes the groups of parameters"
        context.conflict(where, message, "remove one of them")
    adam = file.optimizer is not None and file.optimizer.type.lower() in ("adam", "adamw")
    params = file.optimizer.params if file.optimizer else {}
    own = params.get("weight_decay") or any(group.weight_decay for group in settings.parameter_groups)
    if decays and adam and not own and params.get("torch_adam") is not True:
        message = "has no effect: the optimizer's weight_decay is 0"
        context.no_effect(("dsframe", "no_decay"), message, "write it under optimizer.params")


def _scheduler(context: RuleContext) -> None:
    scheduler = context.file.scheduler
    if scheduler is None:
        return
    name, path = scheduler.type, ("scheduler", "type")
    if name in HF_SCHEDULERS and "dsframe" in context.raw:
        message = f"works in dsframe only: plain DeepSpeed, which does not have {name}, raises"
        remedy = "for plain DeepSpeed choose one of its own, such as WarmupCosineLR"
        context.findings.warning(path, message, remedy, code="portability", at_value=True)
    elif name in TORCH_SCHEDULERS:
        if context.file.zero_optimization.stage:
            context.findings.warning(
                path, f"works in dsframe only: torch's {name} does not accept a ZeRO optimizer, so plain DeepSpeed raises",
                "for plain DeepSpeed choose one of its own, such as WarmupLR",
                code="portability", at_value=True,
            )  # fmt: skip
    elif name not in DEEPSPEED_SCHEDULERS:
        known = [*DEEPSPEED_SCHEDULERS, *TORCH_SCHEDULERS]
        _unknown_name(context, "scheduler", name, known, dict(SCHEDULERS_WITHOUT_ROUTE), "torch.optim.lr_scheduler")
        return
    if "params" not in context.raw["scheduler"] and not context.findings.fails(("scheduler",)):
        message = '"params" is required: DeepSpeed raises'
        context.findings.error(("scheduler",), message, 'add "params": {}', code="missing")
    _parts(context, scheduler.params, ("scheduler", "params"))
    _rates(context, scheduler)
    total, warmup = scheduler.params.get("total_num_steps"), scheduler.params.get("warmup_num_steps", 1000)
    if isinstance(total, int) and isinstance(warmup, int) and total < warmup:
        written = "warmup_num_steps" in scheduler.params
        default = "" if written else ", its default"
        context.findings.warning(
            ("scheduler", "params", "warmup_num_steps" if written else "total_num_steps"),
            f"total_num_steps {total} is less than warmup_num_steps {warmup}{default}: training ends during the warm-up",
            "raise the first or lower the second", code="schedule", at_value=True,
        )  # fmt: skip


def _parts(context: RuleContext, params: dict[str, Any], path: Path) -> None:
    """Report schedules inside of schedules that are not torch's, and the code that they name."""
    context.imports((*path, "lr_lambda"), params.get("lr_lambda"))
    parts = params.get("schedulers")
    for index, part in enumerate(parts if isinstance(parts, list) else ()):
        if not isinstance(part, dict):
            continue  # said already
        name, here = part.get("type"), (*path, "schedulers", index)
        if isinstance(name, str) and name not in TORCH_SCHEDULERS:
            remedy = did_you_mean(name, TORCH_SCHEDULERS, 3, "choose one of torch's")
            message = f"{show(name)} is not in torch.optim.lr_scheduler, as each part must be"
            context.findings.error((*here, "type"), message, remedy, code="value", at_value=True)
        if isinstance(part.get("params"), dict):
            _parts(context, part["params"], (*here, "params"))


def _rates(context: RuleContext, scheduler: Scheduler) -> None:
    """Report a start inside the schedule, and one rate for parameters whose rates differ.

    dsframe's schedules have one rate, which all parameter groups follow in proportion.
    """
    for key in ("last_batch_iteration", "last_epoch"):
        start = scheduler.params.get(key, -1)
        if start != -1:
            message = f"{start} has no meaning here: the schedule starts at the checkpoint's step"
            context.conflict(("scheduler", "params", key), message, "remove it, and continue with --resume")
    for key, value in scheduler.params.items():
        if isinstance(value, list) and len(value) != 1 and key not in ("milestones", "schedulers"):
            message = f"{len(value)} rates, but the schedule has one for all parameters"
            context.conflict(("scheduler", "params", key), message, "write one number")
    optimizer = context.file.optimizer
    rate = optimizer.params.get("lr") if optimizer else None
    if (
        scheduler.type == "WarmupDecayLR"
        and "warmup_max_lr" not in scheduler.params
        and rate not in (None, 1e-3, "auto")
    ):
        context.findings.warning(
            ("scheduler", "params"),
            f"the rate rises to warmup_max_lr, by DeepSpeed's default 0.001, and not to the optimizer's lr {rate:g}",
            'write "warmup_max_lr": "auto" for the optimizer\'s, or the rate that you mean', code="schedule",
        )  # fmt: skip
    if optimizer is None or not (scheduler.type in _OWN_RATES or any(scheduler.params.get(key) for key in _A_RATE)):
        return
    kind, lost = optimizer.type.lower(), ""
    if kind == "muon":
        muon, adam = muon_rates(optimizer.params)
        lost = f"Muon's two halves have {muon:g} and {adam:g}" if muon != adam else ""
    elif kind in MUP:
        lost = f"{optimizer.type}'s rates differ by the layers' widths"
    if lost:
        context.conflict(
            ("scheduler", "type"), f"{scheduler.type} sets one rate for all parameters here, but {lost}",
            'write one "lr" under "optimizer", or choose WarmupCosineLR' if kind == "muon" else "choose WarmupCosineLR",
        )  # fmt: skip

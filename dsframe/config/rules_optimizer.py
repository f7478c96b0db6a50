"""Rules about the optimizer and the schedule of its rates."""

from __future__ import annotations

from collections.abc import Iterable

from dsframe.config.features import needs_cpu_adam, own_adam
from dsframe.config.findings import show
from dsframe.config.rule import Judge
from dsframe.config.schema.optimizer import DEEPSPEED_OPTIMIZERS, MUP, WITHOUT_ROUTE, Optimizer, muon_rates
from dsframe.config.schema.scheduler import DEEPSPEED_SCHEDULERS, SCHEDULERS_WITHOUT_ROUTE, Scheduler
from dsframe.config.schema.torch_optimizer import TORCH_OPTIMIZERS
from dsframe.config.schema.torch_scheduler import TORCH_SCHEDULERS
from dsframe.config.suggest import closest

_TORCH_ADAM_ONLY = ("foreach", "maximize", "fused", "capturable", "differentiable")
_DEEPSPEED_ADAM_ONLY = ("bias_correction", "set_grad_none")
_OWN_RATES = frozenset({"WarmupDecayLR", "LRRangeTest", "OneCycle", "OneCycleLR", "CyclicLR"})
"""Schedules that go by rates of their own, not by the optimizer's."""
_A_RATE = ("warmup_min_lr", "warmup_max_lr", "eta_min")
"""Rates of the other schedules' own, where they are given."""


def judge(bench: Judge) -> None:
    """Report what is wrong with the optimizer and the schedule."""
    _optimizer(bench)
    _scheduler(bench)


def _unknown_name(
    bench: Judge, section: str, name: str, known: Iterable[str], excluded: dict[str, str], torch_home: str
) -> None:
    path = (section, "type")
    reason = excluded.get(name) or excluded.get(name.lower())
    if reason:
        bench.findings.error(path, f"{show(name)} cannot be used: {reason}", code="value", at_value=True)
        return
    similar = next((other for other in known if other.lower() == name.lower()), None) or closest(name, known, 3)
    remedy = f'did you mean "{similar}"?' if similar else ""
    bench.findings.error(
        path, f"{show(name)} is known neither to DeepSpeed nor to {torch_home}", remedy, code="value", at_value=True
    )


def _optimizer(bench: Judge) -> None:
    optimizer = bench.file.optimizer
    if optimizer is None:
        return
    name = optimizer.type
    if name.lower() not in DEEPSPEED_OPTIMIZERS and name not in TORCH_OPTIMIZERS:
        known = [spelling for spelling, _ in DEEPSPEED_OPTIMIZERS.values()] + list(TORCH_OPTIMIZERS)
        _unknown_name(bench, "optimizer", name, known, dict(WITHOUT_ROUTE), "torch.optim")
        return
    kind, stage = name.lower(), bench.file.zero_optimization.stage
    if kind in ("adam", "adamw"):
        _adam(bench)
    _cpu_adam(bench, optimizer)
    if kind == "muon" and stage == 3 and bench.file.zero_optimization.reduce_scatter:
        bench.conflict(
            ("optimizer", "type"), "Muon at stage 3 excludes reduce-scatter: DeepSpeed raises",
            'write "reduce_scatter": false under "zero_optimization"',
        )  # fmt: skip
    if (
        kind == "muon"
        and stage in (1, 2)
        and bench.file.zero_optimization.optimizer_device == "none"
        and bench.by_deepspeed
    ):
        bench.conflict(
            ("optimizer", "type"), "Muon's momentum at stages 1 and 2 is laid out as no checkpoint here can hold it",
            'write "stage": 3 and "reduce_scatter": false under "zero_optimization", or offload the optimizer to the CPU',
        )  # fmt: skip
    if kind == "lamb" and bench.file.fp16.loss_scale != 0:
        bench.conflict(
            ("optimizer", "type"), "Lamb needs dynamic loss scaling: DeepSpeed raises", 'write "loss_scale": 0'
        )
    untested = kind in ("lamb", *MUP) or (kind not in DEEPSPEED_OPTIMIZERS)
    if kind == "adafactor" and stage and bench.by_deepspeed:
        bench.conflict(
            ("optimizer", "type"),
            "Adafactor keeps a row and a column of each matrix, and ZeRO gives it flat shares: another training",
            "set the stage to 0, or choose another optimizer",
        )  # fmt: skip
    elif stage and untested and not bench.file.zero_allow_untested_optimizer:
        bench.conflict(
            ("optimizer", "type"), f"{name} is untested with ZeRO: DeepSpeed raises",
            'add "zero_allow_untested_optimizer": true',
        )  # fmt: skip
    params = optimizer.params
    if kind == "sgd" and params.get("nesterov") is True and (not params.get("momentum") or params.get("dampening")):
        path = ("optimizer", "params", "nesterov")
        bench.conflict(path, "needs momentum above 0 and dampening 0: torch raises", "add the momentum")


def _adam(bench: Judge) -> None:
    """What FusedAdam, CPUAdam and torch's AdamW take is not the same; the others raise a TypeError."""
    params = bench.file.optimizer.params if bench.file.optimizer else {}
    torch_adam = params.get("torch_adam") is True
    path = ("optimizer", "params")
    own, on_cpu = own_adam(bench.file), bench.file.zero_optimization.optimizer_device != "none"
    if params.get("bias_correction") is False and own and not bench.by_deepspeed:
        message = f"torch's Adam, which {bench.engine} runs, always corrects its bias"
        bench.conflict((*path, "bias_correction"), message, 'remove it, or use engine "deepspeed"')
    if "set_grad_none" in params and own and on_cpu:
        bench.conflict((*path, "set_grad_none"), "no argument of DeepSpeed's CPU Adam, which raises", "remove it")
    if not torch_adam:
        for key in _TORCH_ADAM_ONLY:
            if key in params:
                bench.conflict(
                    (*path, key), "an argument of torch's Adam: DeepSpeed's own raises", 'add "torch_adam": true'
                )
        if params.get("amsgrad") is True:
            bench.conflict((*path, "amsgrad"), "DeepSpeed's own Adam raises", 'add "torch_adam": true')
        return
    for key in _DEEPSPEED_ADAM_ONLY:
        if key in params:
            bench.conflict(
                (*path, key), 'no argument of torch\'s Adam: "torch_adam": true raises', "remove one of them"
            )


def _cpu_adam(bench: Judge, optimizer: Optimizer) -> None:
    """What takes DeepSpeed's CPU Adam alone; ZenFlow takes Muon too."""
    path, kind = needs_cpu_adam(bench.file), optimizer.type.lower()
    if path is None or not bench.by_deepspeed or (kind == "muon" and path[-1] == "zenflow"):
        return
    adam = kind in ("adam", "adamw")
    if not adam or optimizer.params.get("torch_adam") is True:
        given, remedy = ("torch's", 'remove "torch_adam"') if adam else (optimizer.type, 'write "type": "AdamW"')
        message = f"needs DeepSpeed's CPU Adam, and the optimizer is {given}: DeepSpeed raises"
        bench.conflict(path, message, f'{remedy} under "optimizer"')


def _scheduler(bench: Judge) -> None:
    scheduler = bench.file.scheduler
    if scheduler is None:
        return
    name, path = scheduler.type, ("scheduler", "type")
    if name in TORCH_SCHEDULERS:
        if bench.file.zero_optimization.stage:
            bench.findings.warning(
                path, f"plain DeepSpeed raises: torch's {name} does not take a ZeRO optimizer",
                "dsframe runs the schedule itself; for plain DeepSpeed choose WarmupLR and its like",
                code="portability", at_value=True,
            )  # fmt: skip
    elif name not in DEEPSPEED_SCHEDULERS:
        known = [*DEEPSPEED_SCHEDULERS, *TORCH_SCHEDULERS]
        _unknown_name(bench, "scheduler", name, known, dict(SCHEDULERS_WITHOUT_ROUTE), "torch.optim.lr_scheduler")
        return
    if "params" not in bench.raw["scheduler"] and not bench.findings.fails(("scheduler",)):
        bench.findings.error(
            ("scheduler",), '"params" is required: DeepSpeed raises', 'add "params": {}', code="missing"
        )
    _rates(bench, scheduler)
    total, warmup = scheduler.params.get("total_num_steps"), scheduler.params.get("warmup_num_steps", 1000)
    if isinstance(total, int) and isinstance(warmup, int) and total < warmup:
        written = "warmup_num_steps" in scheduler.params
        default = "" if written else ", its default"
        bench.findings.warning(
            ("scheduler", "params", "warmup_num_steps" if written else "total_num_steps"),
            f"total_num_steps {total} is less than warmup_num_steps {warmup}{default}: training ends in its warm-up",
            "raise the one or lower the other", code="schedule", at_value=True,
        )  # fmt: skip


def _rates(bench: Judge, scheduler: Scheduler) -> None:
    """Where the course starts, and whose rates it sets: dsframe's has one, which all parameter groups follow in proportion."""
    for key in ("last_batch_iteration", "last_epoch"):
        start = scheduler.params.get(key, -1)
        if start != -1:
            bench.conflict(
                ("scheduler", "params", key), f"{start} has no meaning here: the schedule follows the checkpoint's step",
                "remove it, and go on with --resume",
            )  # fmt: skip
    for key, value in scheduler.params.items():
        if isinstance(value, list) and len(value) != 1 and key != "milestones":
            message = f"{len(value)} rates, and the schedule has one for all parameters"
            bench.conflict(("scheduler", "params", key), message, "write one number")
    optimizer = bench.file.optimizer
    if optimizer is None or not (scheduler.type in _OWN_RATES or any(scheduler.params.get(key) for key in _A_RATE)):
        return
    kind, lost = optimizer.type.lower(), ""
    if kind == "muon":
        muon, adam = muon_rates(optimizer.params)
        lost = f"Muon's halves have {muon:g} and {adam:g}" if muon != adam else ""
    elif kind in MUP:
        lost = f"{optimizer.type}'s differ by the layers' widths"
    if lost:
        bench.conflict(
            ("scheduler", "type"), f"this {scheduler.type} sets one rate for all parameters, and {lost}",
            'write one "lr" under "optimizer", or choose WarmupCosineLR' if kind == "muon" else "choose WarmupCosineLR",
        )  # fmt: skip

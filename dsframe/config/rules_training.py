"""Rules about number formats, the optimizer, the schedule, and dsframe's own section."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from dsframe.config.features import may_be_fp16
from dsframe.config.findings import show
from dsframe.config.rule import Judge
from dsframe.config.schema.optimizer import DEEPSPEED_OPTIMIZERS, WITHOUT_ROUTE
from dsframe.config.schema.scheduler import DEEPSPEED_SCHEDULERS, SCHEDULERS_WITHOUT_ROUTE
from dsframe.config.schema.torch_optimizer import TORCH_OPTIMIZERS
from dsframe.config.schema.torch_scheduler import TORCH_SCHEDULERS
from dsframe.config.settings import EngineName
from dsframe.config.suggest import closest

_TORCH_ADAM_ONLY = ("foreach", "maximize", "fused", "capturable", "differentiable")
_DEEPSPEED_ADAM_ONLY = ("bias_correction", "set_grad_none")


def judge(bench: Judge) -> None:
    """Report what is wrong with the rest of the file."""
    _precision(bench)
    _optimizer(bench)
    _scheduler(bench)
    _dsframe(bench)


def _precision(bench: Judge) -> None:
    file = bench.file
    fp16, bf16, stage = file.fp16, file.bf16, file.zero_optimization.stage
    if fp16.enabled and bf16.enabled:
        bench.conflict(("bf16", "enabled"), "fp16 is enabled too: DeepSpeed raises", "enable one of them")
    if fp16.enabled and fp16.loss_scale == 0:
        for key in ("loss_scale_window", "min_loss_scale"):
            value = getattr(fp16, key)
            if value <= 0:
                bench.conflict(("fp16", key), f"{value} must be above 0 with dynamic loss scaling", "DeepSpeed raises")
    for section, key in (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    ):
        if getattr(getattr(file, section), key) and stage == 0:
            bench.conflict((section, key), "needs ZeRO: DeepSpeed raises", "set the stage to 1, 2 or 3")
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        bench.conflict(
            ("bf16", "bf16_optimizer_states"), "needs bf16_master_weights_and_grads: DeepSpeed raises", "enable both"
        )
    if (
        fp16.enabled
        and fp16.fp16_master_weights_and_grads
        and file.zero_optimization.optimizer_device == "none"
        and stage
    ):
        bench.conflict(
            ("fp16", "fp16_master_weights_and_grads"), "needs optimizer offload with DeepSpeed's CPU Adam: DeepSpeed raises",
            'add "offload_optimizer": {"device": "cpu"}',
        )  # fmt: skip
    _types(bench)


_SHORT = {
    "torch.float16": "fp16", "float16": "fp16", "half": "fp16", "torch.bfloat16": "bf16", "bfloat16": "bf16",
    "torch.float32": "fp32", "float32": "fp32", "float": "fp32", "torch.int8": "int8",
}  # fmt: skip


def _types(bench: Judge) -> None:
    file = bench.file
    model = "fp16" if file.fp16.enabled else "bf16" if file.bf16.enabled else "fp32"
    asked = file.data_types.param_dtype
    if asked is not None and _SHORT.get(asked, asked) != model:
        bench.conflict(
            ("data_types", "param_dtype"), f'"{asked}" contradicts fp16 and bf16, by which parameters are {model}',
            "remove it: DeepSpeed raises",
        )  # fmt: skip
    gradients = file.data_types.grad_accum_dtype
    if gradients is not None and file.zero_optimization.stage == 0 and _SHORT.get(gradients, gradients) != model:
        if (model, _SHORT.get(gradients, gradients)) == ("bf16", "fp32"):
            return
        bench.conflict(
            ("data_types", "grad_accum_dtype"), f'"{gradients}" with {model} parameters needs ZeRO: DeepSpeed raises',
            "remove it, or set the stage to 1, 2 or 3",
        )  # fmt: skip


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
    if kind == "lamb" and bench.file.fp16.loss_scale != 0:
        bench.conflict(
            ("optimizer", "type"), "Lamb needs dynamic loss scaling: DeepSpeed raises", 'write "loss_scale": 0'
        )
    untested = kind in ("lamb", "muadam", "muadamw", "musgd") or (kind not in DEEPSPEED_OPTIMIZERS)
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
    total, warmup = scheduler.params.get("total_num_steps"), scheduler.params.get("warmup_num_steps", 1000)
    if isinstance(total, int) and isinstance(warmup, int) and total < warmup:
        written = "warmup_num_steps" in scheduler.params
        default = "" if written else ", its default"
        bench.findings.warning(
            ("scheduler", "params", "warmup_num_steps" if written else "total_num_steps"),
            f"total_num_steps {total} is less than warmup_num_steps {warmup}{default}: training ends in its warm-up",
            "raise the one or lower the other", code="schedule", at_value=True,
        )  # fmt: skip


def _dsframe(bench: Judge) -> None:
    settings = bench.file.dsframe
    meant = {"average": "mean", "sum": "sum"}.get(settings.horovod.op or "")
    if meant and meant != bench.file.gradient_allreduce_op:
        bench.conflict(
            ("dsframe", "horovod", "op"),
            f'{show(settings.horovod.op)} contradicts gradient_allreduce_op "{bench.file.gradient_allreduce_op}"',
            f'set gradient_allreduce_op to "{meant}", which every engine follows',
        )
    if settings.epochs is not None and settings.steps is not None:
        bench.conflict(("dsframe", "steps"), "epochs is given too", "keep one of them")
    task = settings.task
    name = getattr(task, "name", "")
    if ":" in name:
        bench.findings.note(
            ("dsframe", "task", "name"),
            f"imports and runs code: {name.partition(':')[0]}",
            code="imports",
            at_value=True,
        )
    heads, width = getattr(task, "heads", None), getattr(task, "width", None)
    if isinstance(heads, int) and isinstance(width, int) and width % heads:
        bench.conflict(("dsframe", "task", "heads"), f"{heads} does not divide width {width}", "choose another")
    if getattr(task, "name", "") == "vision":
        dataset = getattr(task, "dataset", "")
        for key, homes in (
            ("classes", ("synthetic",)),
            ("image_size", ("synthetic", "image-folder")),
            ("workers", ("image-folder",)),
        ):
            if bench.wrote("dsframe", "task", key) and dataset not in homes:
                bench.idle(("dsframe", "task", key), f'has no effect with dataset "{dataset}"')
    _engines(bench)
    for engine in get_args(EngineName):
        name = engine.removeprefix("reference-").replace("-", "_")
        if bench.wrote("dsframe", name) and settings.engine not in ("auto", engine):
            bench.findings.note(("dsframe", name), f'has no effect with engine "{settings.engine}"', code="no-effect")


def _engines(bench: Judge) -> None:
    file, ddp, fsdp = bench.file, bench.file.dsframe.ddp, bench.file.dsframe.fsdp
    path: tuple[str, ...] = ("dsframe", "ddp", "communication")
    if ddp.communication == "power_sgd":
        message = "power_sgd would carry what is not finite in one step, and left out of it, into all others"
        unsaid = file.torch_autocast.dtype is None
        if may_be_fp16(file) and unsaid:
            bench.findings.warning(
                path, "torch_autocast without a dtype is float16 on GPUs, where this stops: " + message,
                'add "dtype": "bfloat16" to torch_autocast', code="portability", at_value=True,
            )  # fmt: skip
        if file.fp16.enabled or (may_be_fp16(file) and not unsaid) or file.dsframe.on_nonfinite == "skip":
            remedy = 'use bf16 ("torch_autocast": "dtype": "bfloat16") or fp32, "on_nonfinite": "stop", or another communication'
            bench.conflict(path, message, remedy)
        bench.findings.warning(
            path,
            "power_sgd keeps what it has not sent yet in memory, not in checkpoints: a resumed run starts it anew, and its "
            "losses are not those of a run that was never interrupted",
            "choose another for runs that are resumed", code="resume", at_value=True,
        )  # fmt: skip
    for key in ("power_sgd_rank", "power_sgd_start_step"):
        if bench.wrote("dsframe", "ddp", key) and ddp.communication != "power_sgd":
            bench.idle(("dsframe", "ddp", key), f'has no effect with communication "{ddp.communication}"')
    if bench.wrote("dsframe", "fsdp", "shard_size") and fsdp.sharding == "full":
        bench.idle(("dsframe", "fsdp", "shard_size"), 'has no effect with sharding "full"')
    if bench.engine == "reference-model-parallel" and file.pipeline.stages == 1:
        message = "it cuts the model into pipeline.stages, one for each process, and there is 1"
        bench.conflict(("dsframe", "engine"), message, 'add "pipeline": {"stages": 2}')

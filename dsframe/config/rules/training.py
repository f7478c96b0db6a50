"""Rules about number formats and dsframe's own section."""

from __future__ import annotations

from dsframe.config.features import DTYPES, MADE_HERE, may_be_fp16
from dsframe.config.read.findings import show
from dsframe.config.rules.context import RuleContext
from dsframe.engines.table import BUILT_IN

_DDP = "dsframe.ddp.communication"
_CPU_ADAM = "needs optimizer offload with DeepSpeed's CPU Adam: DeepSpeed raises"


def check(context: RuleContext) -> None:
    """Report what is wrong with number formats and with the ``dsframe`` section."""
    _precision(context)
    _types(context)
    _dsframe(context)
    _task(context)
    _ddp(context)


def _precision(context: RuleContext) -> None:
    fp16, bf16, stage = context.file.fp16, context.file.bf16, context.stage
    if fp16.enabled and bf16.enabled:
        context.conflict("bf16.enabled", "fp16 is enabled as well: DeepSpeed raises", "enable one of them")
    for key, value in (("loss_scale_window", fp16.loss_scale_window), ("min_loss_scale", fp16.min_loss_scale)):
        if fp16.enabled and fp16.loss_scale == 0 and value <= 0:
            message = f"{value} must be above 0 with dynamic loss scaling: DeepSpeed raises"
            context.conflict(f"fp16.{key}", message, "raise it")
    fp16_masters = fp16.fp16_master_weights_and_grads
    bf16_masters, bf16_states = bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states
    on_device = stage and not context.offloads
    for path, wrong, message, remedy in (
        ("fp16.fp16_master_weights_and_grads", fp16_masters and not stage, "needs ZeRO: DeepSpeed raises", ""),
        ("bf16.bf16_master_weights_and_grads", bf16_masters and not stage, "needs ZeRO: DeepSpeed raises", ""),
        ("bf16.bf16_optimizer_states", bf16_states and not stage, "needs ZeRO: DeepSpeed raises", ""),
        ("bf16.bf16_optimizer_states", bf16_states and not bf16_masters,
         "needs bf16_master_weights_and_grads: DeepSpeed raises", "enable both"),
        ("fp16.fp16_master_weights_and_grads", on_device and fp16.enabled and fp16_masters, _CPU_ADAM,
         'add "offload_optimizer": {"device": "cpu"}'),
        ("bf16.bf16_master_weights_and_grads",
         on_device and bf16_masters and not bf16_states and context.by_deepspeed, _CPU_ADAM,
         'add "offload_optimizer": {"device": "cpu"}, or "bf16_optimizer_states": true'),
    ):  # fmt: skip
        if wrong:
            context.conflict(path, message, remedy or "set the stage to 1, 2 or 3")


def _types(context: RuleContext) -> None:
    model, types = context.half or "fp32", context.file.data_types
    if types.param_dtype is not None and DTYPES[types.param_dtype] != model:
        message = f'"{types.param_dtype}" contradicts fp16 and bf16, which make parameters {model}: DeepSpeed raises'
        context.conflict("data_types.param_dtype", message)
    gradients = types.grad_accum_dtype
    if gradients is not None and context.stage == 0 and DTYPES[gradients] != model:
        message = f'"{gradients}" with {model} parameters needs ZeRO: DeepSpeed raises'
        context.conflict("data_types.grad_accum_dtype", message, "remove it, or set the stage to 1, 2 or 3")


def _dsframe(context: RuleContext) -> None:
    settings = context.settings
    for name in settings.pass_through:
        section = name.partition(".")[0]
        if section in MADE_HERE:
            message = f"{show(name)} is not forwarded: dsframe builds the {section} itself"
            context.conflict("dsframe.pass_through", message)
    op, reduction = settings.horovod.op, context.file.gradient_allreduce_op
    meant = {"average": "mean", "sum": "sum"}.get(op or "", reduction)
    if meant != reduction:
        message = f'{show(op)} contradicts gradient_allreduce_op "{reduction}"'
        remedy = f'set gradient_allreduce_op to "{meant}", which every engine follows'
        context.conflict("dsframe.horovod.op", message, remedy)
    if settings.epochs is not None and settings.steps is not None:
        context.conflict("dsframe.steps", "epochs is given as well", "keep one of them")
    for index, hook in enumerate(settings.hooks):
        context.imports(("dsframe", "hooks", index), hook)
    for name in BUILT_IN:
        if context.wrote(f"dsframe.{name}") and settings.engine not in ("auto", name):
            context.note(f"dsframe.{name}", f'has no effect with engine "{settings.engine}"')
    if context.wrote("dsframe.engine_options") and not context.entry.options:
        message = f'has no effect: engine "{context.engine}" takes none'
        context.no_effect("dsframe.engine_options", message)
    if context.wrote("dsframe.fsdp.shard_size") and settings.fsdp.sharding == "full":
        context.no_effect("dsframe.fsdp.shard_size", 'has no effect with sharding "full"')


def _task(context: RuleContext) -> None:
    task = context.settings.task
    context.imports("dsframe.task.name", context.task)
    heads, width = getattr(task, "heads", None), getattr(task, "width", None)
    if isinstance(heads, int) and isinstance(width, int) and width % heads:
        context.conflict("dsframe.task.heads", f"{heads} does not divide width {width}", "choose another")
    dataset = getattr(task, "dataset", "")
    for key, homes in (
        ("classes", ("synthetic", "image-shards")),
        ("image_size", ("synthetic", "image-folder", "image-shards")),
        ("workers", ("image-folder", "image-shards")),
    ):
        path = f"dsframe.task.{key}"
        if context.task == "vision" and context.wrote(path) and dataset not in homes:
            context.no_effect(path, f'has no effect with dataset "{dataset}"')


def _ddp(context: RuleContext) -> None:
    file, ddp = context.file, context.settings.ddp
    if ddp.communication != "power_sgd":
        for key in ("power_sgd_rank", "power_sgd_start_step"):
            if context.wrote(f"dsframe.ddp.{key}"):
                message = f'has no effect with communication "{ddp.communication}"'
                context.no_effect(f"dsframe.ddp.{key}", message)
        return
    message, by_device = "PowerSGD's error feedback would spread one NaN step to all later ones", False
    if may_be_fp16(file) and file.torch_autocast.dtype is None:
        by_device = True
        text = f"torch_autocast without a dtype is float16 on GPUs, and then the run is refused: {message}"
        context.warn(_DDP, text, 'add "dtype": "bfloat16" to torch_autocast', code="portability")
    scaled = file.fp16.enabled or (may_be_fp16(file) and not by_device)
    if scaled or context.settings.on_nonfinite == "skip":
        context.conflict(_DDP, message, 'use bf16 or fp32, "on_nonfinite": "stop", or another communication')
    message = "a resumed run will not continue exactly: PowerSGD's error feedback is not in checkpoints"
    context.warn(_DDP, message, "choose another communication for runs that you resume", code="resume")

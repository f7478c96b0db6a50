"""Rules about number formats and dsframe's own section."""

from __future__ import annotations

from dsframe.config.features import MADE_HERE, may_be_fp16
from dsframe.config.read.findings import show
from dsframe.config.rules.context import RuleContext
from dsframe.engines.table import BUILT_IN


def check(context: RuleContext) -> None:
    """Report what is wrong with the rest of the file."""
    _precision(context)
    _dsframe(context)


def _precision(context: RuleContext) -> None:
    file = context.file
    fp16, bf16, stage = file.fp16, file.bf16, file.zero_optimization.stage
    if fp16.enabled and bf16.enabled:
        context.conflict(("bf16", "enabled"), "fp16 is enabled as well: DeepSpeed raises", "enable one of them")
    if fp16.enabled and fp16.loss_scale == 0:
        for key in ("loss_scale_window", "min_loss_scale"):
            value = getattr(fp16, key)
            if value <= 0:
                message = f"{value} must be above 0 with dynamic loss scaling: DeepSpeed raises"
                context.conflict(("fp16", key), message, "raise it")
    for section, key in (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    ):
        if getattr(getattr(file, section), key) and stage == 0:
            context.conflict((section, key), "needs ZeRO: DeepSpeed raises", "set the stage to 1, 2 or 3")
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        message = "needs bf16_master_weights_and_grads: DeepSpeed raises"
        context.conflict(("bf16", "bf16_optimizer_states"), message, "enable both")
    stays = stage and file.zero_optimization.optimizer_device == "none"
    if stays and fp16.enabled and fp16.fp16_master_weights_and_grads:
        message = "needs optimizer offload with DeepSpeed's CPU Adam: DeepSpeed raises"
        remedy = 'add "offload_optimizer": {"device": "cpu"}'
        context.conflict(("fp16", "fp16_master_weights_and_grads"), message, remedy)
    short = bf16.bf16_master_weights_and_grads and not bf16.bf16_optimizer_states
    if stays and short and context.by_deepspeed:
        message = "needs optimizer offload with DeepSpeed's CPU Adam, or bf16_optimizer_states: DeepSpeed raises"
        remedy = 'add "offload_optimizer": {"device": "cpu"}, or "bf16_optimizer_states": true'
        context.conflict(("bf16", "bf16_master_weights_and_grads"), message, remedy)
    _types(context)


_SHORT = {
    "torch.float16": "fp16", "float16": "fp16", "half": "fp16", "torch.bfloat16": "bf16", "bfloat16": "bf16",
    "torch.float32": "fp32", "float32": "fp32", "float": "fp32", "torch.int8": "int8",
}  # fmt: skip


def _types(context: RuleContext) -> None:
    file = context.file
    model = "fp16" if file.fp16.enabled else "bf16" if file.bf16.enabled else "fp32"
    asked = file.data_types.param_dtype
    if asked is not None and _SHORT.get(asked, asked) != model:
        message = f'"{asked}" contradicts fp16 and bf16, which make parameters {model}: DeepSpeed raises'
        context.conflict(("data_types", "param_dtype"), message, "remove it")
    gradients = file.data_types.grad_accum_dtype
    if gradients is not None and file.zero_optimization.stage == 0 and _SHORT.get(gradients, gradients) != model:
        if (model, _SHORT.get(gradients, gradients)) == ("bf16", "fp32"):
            return
        message = f'"{gradients}" with {model} parameters needs ZeRO: DeepSpeed raises'
        context.conflict(("data_types", "grad_accum_dtype"), message, "remove it, or set the stage to 1, 2 or 3")


def _dsframe(context: RuleContext) -> None:
    settings = context.file.dsframe
    for name in settings.pass_through:
        section = name.partition(".")[0]
        if section in MADE_HERE:
            message = f"{show(name)} is not forwarded: dsframe builds the {section} itself"
            context.conflict(("dsframe", "pass_through"), message, "remove it")
    op = settings.horovod.op if context.wrote("dsframe", "horovod") else None
    meant = {"average": "mean", "sum": "sum"}.get(op or "")
    if meant and meant != context.file.gradient_allreduce_op:
        message = f'{show(op)} contradicts gradient_allreduce_op "{context.file.gradient_allreduce_op}"'
        remedy = f'set gradient_allreduce_op to "{meant}", which every engine follows'
        context.conflict(("dsframe", "horovod", "op"), message, remedy)
    if settings.epochs is not None and settings.steps is not None:
        context.conflict(("dsframe", "steps"), "epochs is given as well", "keep one of them")
    task = settings.task
    name = getattr(task, "name", "")
    context.imports(("dsframe", "task", "name"), name)
    for number, hook in enumerate(context.file.dsframe.hooks):
        context.imports(("dsframe", "hooks", number), hook)
    heads, width = getattr(task, "heads", None), getattr(task, "width", None)
    if isinstance(heads, int) and isinstance(width, int) and width % heads:
        context.conflict(("dsframe", "task", "heads"), f"{heads} does not divide width {width}", "choose another")
    if getattr(task, "name", "") == "vision":
        dataset = getattr(task, "dataset", "")
        for key, homes in (
            ("classes", ("synthetic", "image-shards")),
            ("image_size", ("synthetic", "image-folder", "image-shards")),
            ("workers", ("image-folder", "image-shards")),
        ):
            if context.wrote("dsframe", "task", key) and dataset not in homes:
                context.no_effect(("dsframe", "task", key), f'has no effect with dataset "{dataset}"')
    if context.wrote("dsframe", "ddp"):
        _ddp(context)
    if context.wrote("dsframe", "fsdp"):
        _fsdp(context)
    for name in BUILT_IN:
        if context.wrote("dsframe", name) and settings.engine not in ("auto", name):
            context.findings.note(("dsframe", name), f'has no effect with engine "{settings.engine}"', code="no-effect")
    if context.wrote("dsframe", "engine_options") and not context.entry.options:
        context.no_effect(("dsframe", "engine_options"), f'has no effect: engine "{context.engine}" takes none')


def _ddp(context: RuleContext) -> None:
    file, ddp = context.file, context.file.dsframe.ddp
    path: tuple[str, ...] = ("dsframe", "ddp", "communication")
    if ddp.communication == "power_sgd":
        message = "PowerSGD's error feedback would spread one NaN step to all later ones"
        unsaid = file.torch_autocast.dtype is None
        if may_be_fp16(file) and unsaid:
            context.findings.warning(
                path, "torch_autocast without a dtype is float16 on GPUs, and then the run is refused: " + message,
                'add "dtype": "bfloat16" to torch_autocast', code="portability", at_value=True,
            )  # fmt: skip
        if file.fp16.enabled or (may_be_fp16(file) and not unsaid) or file.dsframe.on_nonfinite == "skip":
            remedy = 'use bf16 ("torch_autocast": "dtype": "bfloat16") or fp32, "on_nonfinite": "stop", or another communication'
            context.conflict(path, message, remedy)
        message = "a resumed run will not continue exactly: PowerSGD's error feedback is not in checkpoints"
        remedy = "choose another communication for runs that you resume"
        context.findings.warning(path, message, remedy, code="resume", at_value=True)
    for key in ("power_sgd_rank", "power_sgd_start_step"):
        if context.wrote("dsframe", "ddp", key) and ddp.communication != "power_sgd":
            context.no_effect(("dsframe", "ddp", key), f'has no effect with communication "{ddp.communication}"')


def _fsdp(context: RuleContext) -> None:
    if context.wrote("dsframe", "fsdp", "shard_size") and context.file.dsframe.fsdp.sharding == "full":
        context.no_effect(("dsframe", "fsdp", "shard_size"), 'has no effect with sharding "full"')

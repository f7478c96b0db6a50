"""Rules about number formats and dsframe's own section."""

from __future__ import annotations

from typing import get_args

from dsframe.config.features import MADE_HERE, may_be_fp16
from dsframe.config.findings import show
from dsframe.config.rule import Judge
from dsframe.config.settings import EngineName


def judge(bench: Judge) -> None:
    """Report what is wrong with the rest of the file."""
    _precision(bench)
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
    if (
        bench.by_deepspeed
        and bf16.bf16_master_weights_and_grads
        and not bf16.bf16_optimizer_states
        and file.zero_optimization.optimizer_device == "none"
        and stage
    ):
        bench.conflict(
            ("bf16", "bf16_master_weights_and_grads"),
            "needs optimizer offload with DeepSpeed's CPU Adam, or bf16_optimizer_states: DeepSpeed raises",
            'add "offload_optimizer": {"device": "cpu"}, or "bf16_optimizer_states": true',
        )
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


def _dsframe(bench: Judge) -> None:
    settings = bench.file.dsframe
    for name in settings.pass_through:
        section = name.partition(".")[0]
        if section in MADE_HERE:
            message = f"{show(name)} reaches nobody: dsframe makes the {section} itself, from the keys it knows"
            bench.conflict(("dsframe", "pass_through"), message, "remove it")
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

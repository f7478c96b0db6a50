"""Rules about checkpoints, I/O, and sections of DeepSpeed's that no training here uses."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dsframe.config.features import logger_packages
from dsframe.config.rules.context import RuleContext

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Exists while the driver is loaded: tells without torch whether this machine has CUDA devices."""
_OF_DEEPSPEED = (
    "checkpoint.load_universal",
    "checkpoint.use_node_local_storage",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
)
"""Keys about DeepSpeed's own checkpoints, which dsframe does not write."""


def check(context: RuleContext) -> None:
    """Report what is wrong with the sections around the training."""
    file = context.file
    if file.aio.use_gds and not NVIDIA_DRIVER.exists():
        message = "needs CUDA, which this machine does not have: DeepSpeed raises"
        context.conflict("aio.use_gds", message, "write false")
    if file.checkpoint.writer is not None and file.checkpoint.writer.type == "PYTHON":
        message = "the writer PYTHON of DeepSpeed 0.19.8 fails when it saves"
        context.warn("checkpoint.writer.type", message, "remove the writer", code="broken")
    for path in _OF_DEEPSPEED:
        if context.wrote("dsframe") and context.wrote(path):
            context.no_effect(path, "has no effect: dsframe's checkpoints are of another form, see dsframe.checkpoints")
    _packages(context)
    if file.disable_allgather:
        context.no_effect("disable_allgather", "has no effect: DeepSpeed 0.19 reads it and never uses it")
    if context.wrote("weight_quantization"):
        context.note("weight_quantization", "has no effect on training, only on inference")
    if file.autotuning.enabled:
        context.note("autotuning", "has no effect without deepspeed --autotuning")


def _packages(context: RuleContext) -> None:
    """Report packages that a section needs. Without them rank 0 alone raises, and the others wait for it."""
    for path, package in logger_packages(context.file, context.settings):
        if find_spec(package) is None:
            message = f"switched on, but the package {package} is not installed here: DeepSpeed raises"
            context.warn(path, message, "install it, or write false", code="not-installed")

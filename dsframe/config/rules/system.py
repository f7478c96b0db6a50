"""Rules about what this machine lacks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dsframe.config.features import needed_packages
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.parameters import HF_SCHEDULERS

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Exists while the driver is loaded: shows without torch whether this machine has CUDA devices."""


def check(context: RuleContext) -> None:
    """Reports what this machine lacks. Without a logger's package only rank 0 would raise, and the others wait for
    it."""
    file = context.file
    packages = [*needed_packages(file, context.settings)]
    if file.datastates_ckpt is not False:
        packages.append((("datastates_ckpt",), "datastates"))
    for path, package in packages:
        if importlib.util.find_spec(package) is None:
            message = f"needs the package {package}, which is not installed here: the run ends at once"
            context.warn(path, message, "install it, or take it out", code="not-installed")
    name = file.scheduler.type if file.scheduler else ""
    if name in HF_SCHEDULERS and name != "ReduceLROnPlateau" and importlib.util.find_spec("transformers") is None:
        message, remedy = f"{name} needs the package transformers", "pip install 'dsframe[transformers]'"
        context.warn("scheduler.type", message, remedy, code="not-installed")
    if file.aio.use_gds and not NVIDIA_DRIVER.exists():
        message = "needs CUDA, which this machine does not have: DeepSpeed raises"
        context.conflict("aio.use_gds", message, "write false")

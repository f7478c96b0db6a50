"""Where a run's figures come from: what was started, by which command, with which versions, on which machine."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dsframe import __version__
from dsframe.config.read.secrets import redact

_PACKAGES = ("torch", "deepspeed", "horovod", "numpy", "torchvision", "transformers")


def provenance() -> dict[str, Any]:
    """Plain values, as JSON has them. Versions are those that are installed, whether the run uses them or not."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": redact([*_program(), *sys.argv[1:]]),
        "directory": str(Path.cwd()),
        "git": git(Path.cwd()),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "versions": {"python": platform.python_version(), "dsframe": __version__}
        | {name: _version(name) for name in _PACKAGES},
    }


def _program() -> list[str]:
    """How Python was told what to run: a module's file name says no more than ``-m`` and its name would."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return ["python", "-m", spec.name] if spec is not None else ["python", sys.argv[0]]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git(directory: Path) -> dict[str, Any] | None:
    """The commit that ``directory`` is at, and whether files differ from it; None where it is under no git."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words], cwd=directory, capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "changed": bool(ask("status", "--porcelain", "-uno"))}


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

"""The set-up's branch for GPUs, for real, on a machine that has nvcc and perhaps no GPU: torch with CUDA, Horovod with NCCL, and
DeepSpeed's fused Adam, compiled and imported. Nothing is trained.

It downloads 3 GB and compiles for ten minutes: only where ``DSFRAME_TEST_CUDA=1`` asks for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import REPOSITORY

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.environ.get("DSFRAME_TEST_CUDA") != "1", reason="DSFRAME_TEST_CUDA=1 asks for it: 3 GB"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
]

HOROVOD = """
import torch
import horovod.torch as hvd

assert torch.version.cuda, torch.__version__
assert hvd.nccl_built()
assert hvd.cuda_built()
"""
FUSED_ADAM = """
from deepspeed.ops.op_builder import FusedAdamBuilder

assert FusedAdamBuilder().load(verbose=False).multi_tensor_adam
"""


def test_what_gpus_need_is_built(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(clone)], check=True)
    outside = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    subprocess.run(["launch/setup"], cwd=clone, env=outside | {"DSFRAME_TORCH": "cuda"}, check=True)
    python = clone / ".venv" / "bin" / "python"

    def run(program: str, **more: str) -> None:
        subprocess.run([python, "-c", program], cwd=clone, env=outside | more, check=True)

    run(HOROVOD)
    told = subprocess.run(["nvcc", "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False)
    (top,) = (line.partition("TOP=")[2] for line in told.stderr.splitlines() if "TOP=" in line)
    # A toolkit may lack libraries' headers, which torch's own packages have.
    headers = ":".join(map(str, (clone / ".venv").glob("lib/python3*/site-packages/nvidia/cu*/include")))
    run(
        FUSED_ADAM,
        DS_ACCELERATOR="cuda",
        TORCH_CUDA_ARCH_LIST="9.0",
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
        CUDA_HOME=str(Path(top).resolve()),
        CPATH=headers,
        PATH=f"{python.parent}:{outside['PATH']}",
    )

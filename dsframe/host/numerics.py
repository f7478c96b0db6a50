"""How this process computes: torch's switches for deterministic algorithms and for TF32, the same on every engine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dsframe.errors import EngineError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_FIXED = ":4096:8"
"""cuBLAS with a workspace of a fixed size for each stream: without it sums of a matrix product have no fixed order."""


OLDEST = (2, 13)
"""The oldest release of torch with which dsframe was run as a whole. With 2.6 three of the things that it calls are missing."""


def check_release(version: str) -> None:
    """Raises EngineError where this torch is too old. ``version``: such as ``2.13.0+cpu``."""
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EngineError(
            f"torch {version} is too old: dsframe calls parts of torch that came later; pip install 'torch>={oldest}'"
        )


@contextmanager
def chosen(*, deterministic: bool, tf32: bool) -> Iterator[None]:
    """Inside it torch computes so; afterwards as before. To be entered before the first product on a GPU: cuBLAS reads its variable
    then.

    ``deterministic``: an operator that has no deterministic algorithm raises. False leaves torch as it is.
    ``tf32``: on GPUs, fp32 matrix products and convolutions by TF32; else neither. CPUs are left alone.
    """
    cuda, cudnn, variable = torch.backends.cuda, torch.backends.cudnn, os.environ.get(CUBLAS)
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    attention = cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    benchmark, on_gpu = cudnn.benchmark, torch.cuda.is_available()
    formats = (cuda.matmul.allow_tf32, cudnn.allow_tf32) if on_gpu else ()
    try:
        if deterministic:
            os.environ.setdefault(CUBLAS, CUBLAS_FIXED)
            torch.use_deterministic_algorithms(True)
            cudnn.benchmark = False  # which times algorithms, and may take another one each time
            # Their backward passes add in no fixed order. Flash attention's has a deterministic form, which torch takes then.
            cuda.enable_mem_efficient_sdp(False)
            cuda.enable_cudnn_sdp(False)
        if on_gpu:
            cuda.matmul.allow_tf32 = cudnn.allow_tf32 = tf32
        yield
    finally:
        if deterministic:  # to set it, even to what it is, imports torch's compiler
            torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        cuda.enable_mem_efficient_sdp(attention[0])
        cuda.enable_cudnn_sdp(attention[1])
        cudnn.benchmark = benchmark
        if formats:
            cuda.matmul.allow_tf32, cudnn.allow_tf32 = formats
        if variable is None:
            os.environ.pop(CUBLAS, None)

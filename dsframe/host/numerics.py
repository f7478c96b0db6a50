"""How this process computes: torch's switches for deterministic algorithms and for TF32, the same on every engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from dsframe.errors import EngineError, TaskError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_FIXED = ":4096:8"
"""cuBLAS with a workspace of a fixed size for each stream: without it sums of a matrix product have no fixed order."""


def check_default_device() -> None:
    """Raises EngineError where the caller has set another than the CPU: samplers and models are made there, and moved."""
    if (device := torch.get_default_device()).type != "cpu":
        raise EngineError(
            f"torch's default device is {device}, and dsframe moves models and batches to the device of each process itself; call "
            "torch.set_default_device(None), or leave torch.device(...), before the run"
        )


@contextmanager
def outside_of_the_callers() -> Iterator[None]:
    """Inside it torch records gradients and casts nothing, as at the start of a program, whatever the caller is inside of.

    Raises TaskError in the place of torch's error for a model of torch's default dtype float64 that meets other numbers.
    """
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))  # records gradients, in no_grad() too
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        try:
            yield
        except RuntimeError as error:
            if torch.get_default_dtype() != torch.float64 or "double" not in str(error).lower():
                raise
            raise TaskError(
                f"{error}: torch's default dtype is float64, and so are new models; return data of float64, or call "
                "torch.set_default_dtype(torch.float32)"
            ) from error


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

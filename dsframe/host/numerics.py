"""Sets torch's switches for deterministic algorithms and for TF32, the same on every engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from dsframe.errors import EngineError, TaskError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_FIXED = ":4096:8"
"""A fixed cuBLAS workspace for each stream; without it sums in a matrix product have no fixed order."""


def check_default_device() -> None:
    """Raises EngineError if torch's default device is not the CPU, where samplers and models are created."""
    if (device := torch.get_default_device()).type != "cpu":
        raise EngineError(
            f"torch's default device is {device}, and dsframe moves models and batches to the device of each process itself; call "
            "torch.set_default_device(None), or leave torch.device(...), before the run"
        )


@contextmanager
def outside_of_the_callers() -> Iterator[None]:
    """Enables gradients and disables autocast inside the context, whatever the caller has set. Raises TaskError instead
    of torch's error if a model with torch's default dtype float64 meets another dtype."""
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
    """Applies the settings inside the context and restores torch's afterwards. Enter it before the first product on a
    GPU, when cuBLAS reads its variable.

    ``deterministic``: True: an operator without a deterministic algorithm raises. False: torch's setting is unchanged.
    ``tf32``: whether GPUs compute fp32 matrix products and convolutions in TF32. Does not affect CPUs.
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
            cudnn.benchmark = False  # it times algorithms, and may choose others each time
            # Their backward passes add in no fixed order. Torch then uses flash attention in its deterministic form.
            cuda.enable_mem_efficient_sdp(False)
            cuda.enable_cudnn_sdp(False)
        if on_gpu:
            cuda.matmul.allow_tf32 = cudnn.allow_tf32 = tf32
        yield
    finally:
        if deterministic:  # setting it, even to its value, imports torch's compiler
            torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        cuda.enable_mem_efficient_sdp(attention[0])
        cuda.enable_cudnn_sdp(attention[1])
        cudnn.benchmark = benchmark
        if formats:
            cuda.matmul.allow_tf32, cudnn.allow_tf32 = formats
        if variable is None:
            os.environ.pop(CUBLAS, None)

"""A short measurement of this machine, for predictions in its own seconds: the model's passes, memory, collectives."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dsframe import collectives
from dsframe.config import Config
from dsframe.engine import call
from dsframe.engines import precision
from dsframe.plan.hardware import TABLE, Hardware
from dsframe.plan.model import Model
from dsframe.plan.trace import example
from dsframe.tasks.task import Task

REPEATS = 5
_LARGE = 2**26
"""Bytes of the tensors whose copies and collectives give bandwidths."""


def calibrate(config: Config, task: Task, model: Model, processes: int) -> Hardware:
    """This machine with ``processes`` on it, and how long one sample of ``model`` takes forward and backward.

    The passes are run as often as a rank would run them, with as many threads as a rank gets. Raises what the model raises.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    threads = config.settings.threads_per_rank or int(os.environ.get("OMP_NUM_THREADS", "0"))
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // processes))
    found = collectives.measure("nccl" if on_gpu and torch.cuda.device_count() > 1 else "gloo")
    if isinstance(found, str):
        raise RuntimeError(f"collectives could not be measured: {found}")
    latency, bandwidth = _ring({timing.collective: timing.seconds for timing in found})
    if on_gpu:
        memory = torch.cuda.mem_get_info(device)[1]
        reserved = memory - torch.cuda.mem_get_info(device)[0]
    else:
        import psutil

        memory, reserved = psutil.virtual_memory().total // processes, psutil.Process().memory_info().rss
    moved = 2 * _LARGE / _seconds(_copier(device), device)
    base = TABLE["cpu"]
    machine = Hardware(
        name="this machine",
        memory_bytes=float(memory),
        flops_short=_products(torch.bfloat16, device),
        flops_full=_products(torch.float32, device),
        memory_bandwidth=moved,
        devices=max(processes, 2),
        link_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        link_latency=latency,
        network_latency=latency,
        host_bandwidth=moved if not on_gpu else base.host_bandwidth,
        host_memory_bandwidth=moved if not on_gpu else base.host_memory_bandwidth,
        host_memory_bytes=float(memory),
        reserved_bytes=float(reserved),
        lazy_memory=not on_gpu,
        compute_share=1.0,
        transfer_share=1.0,
    )
    rows = config.batch(processes, replicas=True).micro_batch_size
    return replace(machine, known={model.key: _seconds(_passes(config, task, rows, device), device) / rows})


def _ring(seconds: dict[str, dict[int, float]]) -> tuple[float, float]:
    """Latency of a hop and bandwidth, from an all-reduce of two ranks: 2 hops, each of half the tensor."""
    small, large = seconds["all_reduce"][collectives.LATENCY_BYTES], seconds["all_reduce"][_LARGE]
    return small / 2, _LARGE / max(large - small, 1e-9)


def _products(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP a second of a product of two matrices."""
    size = 4096 if device.type == "cuda" else 768
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2.0 * size**3 / _seconds(lambda: left @ right, device)


def _copier(device: torch.device) -> Any:
    source, target = (torch.zeros(_LARGE // 4, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def _passes(config: Config, task: Task, rows: int, device: torch.device) -> Any:
    """A micro-batch forward and backward, of zeros in the shapes of the task's samples."""
    dtype = precision.parameter_dtype(config)
    with device:
        model = task.model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)

    def fill(leaf: Any) -> Any:
        return (
            torch.zeros((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=device) if isinstance(leaf, Tensor) else leaf
        )

    inputs, targets = tree_map(fill, example(task))
    inputs = precision.cast_inputs(inputs, dtype)

    def once() -> None:
        with precision.autocast(config, device):
            outputs = call(model, inputs)
        task.loss(precision.cast_outputs(outputs), targets).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return once


def _seconds(action: Any, device: torch.device) -> float:
    """Median of some calls, after two that do not count."""
    times = []
    for _ in range(REPEATS + 2):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])

"""A short measurement of this machine, for predictions in its own seconds: the model's passes, memory, collectives.

Everything is measured in as many processes at once as the run has, because they share caches, memory and cores:
``python -m dsframe.tools.plan.calibrate`` is one of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from dsframe import engines, tasks
from dsframe.config import Config, load
from dsframe.engine import call
from dsframe.engines import precision
from dsframe.host.memory import keep_freed, resident_bytes
from dsframe.tasks.meta import example
from dsframe.tasks.task import loss_and_terms
from dsframe.tools import collectives
from dsframe.tools.plan.choose import engine_of
from dsframe.tools.plan.hardware import TABLE, Hardware
from dsframe.tools.plan.model import Model
from dsframe.train import leave_at_once

REPEATS, AT_LEAST_SECONDS, AT_MOST = 5, 2.0, 300
"""Of what is measured: as often as this, and for as long, so that what others do on the machine for a moment does not count."""
MOST = 8
"""Processes that are started at most."""
_LARGE = 2**26
"""Bytes of the tensors whose copies and collectives give bandwidths."""


def calibrate(config: Config, model: Model, processes: int) -> Hardware:
    """This machine with ``processes`` on it, and how long one sample of ``model`` takes forward and backward there.

    The file's own task is run, with as many threads as a rank gets. Raises RuntimeError where that fails.
    """
    gpus = torch.cuda.device_count()
    here = min(processes, gpus or MOST)
    rows = config.batch(processes, replicas=engines.TABLE[engine_of(config)].replicas).micro_batch_size
    with tempfile.TemporaryDirectory() as folder:
        file, result = Path(folder, "file.json"), Path(folder, "measured.json")
        file.write_text(json.dumps(config.shown()), encoding="utf-8")
        command = [sys.executable, "-m", "dsframe.tools.plan.calibrate", str(file), "--rows", str(rows)]
        command += ["--out", str(result)]
        failure = collectives.run_ranks(command, here, Path(folder, "log"), {"PYTHONWARNINGS": "ignore"})
        if failure or not result.exists():
            raise RuntimeError(f"this machine could not be measured: {failure or 'it left no timings'}")
        found: dict[str, float] = json.loads(result.read_text(encoding="utf-8"))
    latency, bandwidth = (found["latency"], found["bandwidth"]) if here > 1 else _two_ranks(on_gpu=gpus > 0)
    if gpus:
        free, memory = torch.cuda.mem_get_info()
        reserved = float(memory - free)
    else:
        import psutil

        memory, reserved = psutil.virtual_memory().total // processes, found["resident"]
    base, moved = TABLE["cpu"], found["moved"]
    machine = Hardware(
        name="this machine",
        memory_bytes=float(memory),
        flops_short=found["flops_short"],
        flops_full=found["flops_full"],
        memory_bandwidth=moved,
        devices=max(processes, 2),
        link_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        link_latency=latency,
        network_latency=latency,
        host_bandwidth=base.host_bandwidth if gpus else moved,
        host_memory_bandwidth=base.host_memory_bandwidth if gpus else moved,
        host_memory_bytes=float(memory),
        reserved_bytes=reserved,
        fresh_bandwidth=math.inf if gpus else found["fresh"],
        lazy_memory=not gpus,
        compute_share=1.0,
        transfer_share=1.0,
    )
    return replace(machine, known={model.key: found["passes"] / rows}, alone_share=found["alone"] / found["passes"])


def _two_ranks(*, on_gpu: bool) -> tuple[float, float]:
    """Latency of a hop and bandwidth, for what one process would become."""
    found = collectives.measure("nccl" if on_gpu and torch.cuda.device_count() > 1 else "gloo")
    if isinstance(found, str):
        raise RuntimeError(f"collectives could not be measured: {found}")
    seconds = next(timing.seconds for timing in found if timing.collective == "all_reduce")
    return _ring(2, seconds[collectives.LATENCY_BYTES], seconds[_LARGE])


def _ring(ranks: int, small: float, large: float) -> tuple[float, float]:
    """Latency of a hop and bandwidth, from the seconds of all-reduces of next to nothing and of ``_LARGE`` bytes."""
    hops = 2 * (ranks - 1)
    return small / hops, hops / ranks * _LARGE / max(large - small, 1e-9)


# One of the processes.


def main(argv: Sequence[str] | None = None) -> int:
    """**Collective.** Measures as one process of several; rank 0 writes what the slowest of them took to ``--out``."""
    parser = argparse.ArgumentParser(prog="dsframe.tools.plan.calibrate")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", required=True, type=int)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args(argv)
    config = load(options.file)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    threads = config.settings.threads_per_rank or int(os.environ.get("OMP_NUM_THREADS", "0"))
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cpu":
        keep_freed()  # as a run does
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    resident = resident_bytes(device)  # now: what follows leaves memory behind that no run has
    passes = _passes(config, options.rows, device)
    together = _seconds(passes, device)
    shared = ranks > 1 and device.type == "cpu"
    found = {
        "resident": resident,
        "passes": together,
        "alone": min(together, _seconds(passes if rank == 0 else _nothing, device)) if shared else together,
        "flops_short": _products(torch.bfloat16, device),
        "flops_full": _products(torch.float32, device),
        "moved": 2 * _LARGE / _seconds(_copier(device), device),
    }
    if device.type == "cpu":
        found["fresh"] = _LARGE / _seconds(lambda: torch.empty(_LARGE // 4).fill_(1.0), device)
    if ranks > 1:
        small, large = torch.zeros(2, device=device), torch.zeros(_LARGE // 4, device=device)
        times = [_seconds(lambda tensor=tensor: dist.all_reduce(tensor), device) for tensor in (small, large)]  # type: ignore[misc]
        found["latency"], found["bandwidth"] = _ring(ranks, *times)
    dist.destroy_process_group()
    if rank == 0:
        options.out.write_text(json.dumps(found), encoding="utf-8")
    return 0


def _nothing() -> None:
    """What the others do meanwhile."""


def _products(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP a second of a product of two matrices."""
    size = 4096 if device.type == "cuda" else 768
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2.0 * size**3 / _seconds(lambda: left @ right, device)


def _copier(device: torch.device) -> Callable[[], Any]:
    source, target = (torch.zeros(_LARGE // 4, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def _passes(config: Config, rows: int, device: torch.device) -> Callable[[], None]:
    """A micro-batch forward and backward, of zeros in the shapes of the task's samples."""
    task = tasks.build(config.settings.task, config.settings.seed)
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
        loss_and_terms(task.loss(precision.cast_outputs(outputs), targets))[0].backward()
        model.zero_grad()

    return once


def _seconds(action: Callable[[], Any], device: torch.device) -> float:
    """**Collective.** Median over some calls, after two that do not count, of the time that the slowest rank took."""
    times: list[float] = []
    total = 0.0  # the same on every rank
    while len(times) < REPEATS + 2 or (total < AT_LEAST_SECONDS and len(times) < AT_MOST):
        dist.barrier()
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = torch.tensor(time.perf_counter() - began, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(float(taken))
        total += times[-1]
    return statistics.median(times[2:])


if __name__ == "__main__":
    leave_at_once(main())  # taking down C++ objects at times ends in SIGABRT

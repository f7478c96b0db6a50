"""How much of what a step sends is hidden behind its computation.

    torchrun --nproc-per-node=2 -m benchmarks.overlap
    unshare -n sh -c 'ip link set lo up; tc qdisc add dev lo root tbf rate 2gbit burst 256kb latency 1s; exec "$0" "$@"' \\
        torchrun --nproc-per-node=2 -m benchmarks.overlap      # over 2 Gbit/s for both directions together (Linux, as root)

A step of the GPT takes t. Its computation alone, on all ranks at once and without a word between them, takes c; its collectives
alone, sent again one after the other (dsframe/observe/replay.py), take s. Hidden is 1 - (t - c) / s: 1 where nobody ever waits, 0
where everybody always does, less where ranks or threads get in each other's way. Medians of rounds in turns.
On one machine what is sent takes the same cores that compute, so that there is little to hide; a slow link takes time and no core.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.overhead import OPTIONS, document, engine_of
from dsframe import tasks
from dsframe.cluster import process_group, world
from dsframe.config import load
from dsframe.errors import EngineError
from dsframe.observe import replay
from dsframe.train import leave_at_once

ENGINES = ("ddp", "horovod", "fsdp", "zero1", "zero2", "zero3")


def main() -> None:
    """**Collective.**"""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    here = world.here()
    if here.size < 2:
        raise SystemExit("one process sends nothing: start two at least")
    process_group.open_process_group(here, process_group.device_of(here))
    process_group.open_process_group = lambda *_: None  # one group for all that is measured
    gpt = {
        "name": "language",
        "layers": arguments.layers,
        "heads": 8,
        "width": 256,
        "context": 128,
        "corpus": "synthetic",
    }
    file = {**document(8 * here.size), "dsframe": {"task": gpt}}
    lines = []
    for name in arguments.engines.split(","):
        task = tasks.build(load(file).settings.task, 0)
        task.seed = 0
        try:
            engine, stream = engine_of(name, task, file)
        except EngineError as error:  # is not installed here, say
            lines.append(f"| {name} | {error} |")
            continue
        model = task.model()
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)

        def alone(model: nn.Module = model, optimizer: Any = optimizer, task: Any = task, stream: Any = stream) -> None:
            inputs, targets = next(stream)
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        def step(engine: Any = engine, stream: Any = stream) -> None:
            engine.train_step(iter([next(stream)]))

        whole, computed = taken((step, alone), arguments.rounds, arguments.steps)
        sent = replay.measure(engine, iter([next(stream)]))
        if "problem" in sent:
            lines.append(f"| {name} | {sent['problem']} |")
            continue
        calls = sum(sent["calls"].values())
        share = f"{1 - (whole - computed) / sent['seconds']:.0%}" if calls else "nothing sent"
        figures = f"{whole * 1e3:.1f} | {computed * 1e3:.1f} | {sent['seconds'] * 1e3:.1f} | {calls}"
        lines.append(f"| {name} | {figures} | {share} |")
    if here.is_main:
        print("| engine | step, ms | computation alone, ms | sending alone, ms | collectives | hidden |")
        print("|---|---|---|---|---|---|", *lines, sep="\n", flush=True)
    dist.barrier()
    leave_at_once(0)


def taken(ways: tuple[Callable[[], None], ...], rounds: int, steps: int) -> list[float]:
    """**Collective.** Seconds a step of each, the median of rounds in turns, after one that does not count."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for way, found in list(zip(ways, times, strict=True))[:: 1 if turn % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                way()
            dist.barrier()
            if turn:
                found.append((time.perf_counter() - began) / steps)
    return [statistics.median(found) for found in times]


if __name__ == "__main__":
    main()

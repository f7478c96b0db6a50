"""``dsframe tune --batch``: the largest micro-batch that fits, by short trainings of the file, one after another.

The global batch stays: of what it can be divided into, the sizes of a micro-batch are tried from the smallest on until one does not
fit, with as many accumulation steps as each needs. So the training is the same with each, and only memory and rate differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dsframe.config import Config, load
from dsframe.config.resolve import memory
from dsframe.errors import TaskError, TrainingError
from dsframe.run_dir.record import read_summary
from dsframe.text import columns
from dsframe.tools import subprocess_runs

STEPS = 3
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory|bad_alloc|MemoryError|exit code -9|SIGKILL",
    re.I,
)
"""What torch, the system and launchers say of it."""


@dataclass(frozen=True)
class Try:
    """One size and what came of it."""

    micro_batch: int
    accumulation: int
    fits: bool
    peak_bytes: int | None = None
    """Of the rank that took most; None where it ended before it could say."""
    rate: float | None = None
    """Of the whole training, a second, in the task's unit."""
    why: str = ""


def find(options: argparse.Namespace) -> int:
    """Trains, prints a table and what to write into the file; returns 0, and 1 where not even the smallest fits.

    ``options``: those of ``dsframe tune``. Raises TrainingError where a training fails for another reason than memory.
    """
    try:
        limit = memory.parse(options.memory) if options.memory else None
    except ValueError as error:
        raise TaskError(f"--memory: {error}") from None
    config = load(options.config, overrides=options.overrides)
    tried: list[Try] = []
    for micro_batch, accumulation in _candidates(config, options.processes):
        tried.append(_try(options, micro_batch, accumulation, limit))
        one = tried[-1]
        print(f"micro-batch {one.micro_batch}: {_told(one)}", file=sys.stderr, flush=True)
        if not one.fits:
            break
    best = next((one for one in reversed(tried) if one.fits), None)
    if options.format == "json":
        print(json.dumps([asdict(one) for one in tried], indent=1))
        return int(best is None)
    rows = [["micro-batch", "accumulation", "memory", "a second"]]
    for one in tried:
        rows.append([str(one.micro_batch), str(one.accumulation), _told(one), f"{one.rate:,.1f}" if one.rate else ""])
    print("\n".join(columns(rows, left=1)))
    if best is None:
        print("no micro-batch fits: shard or offload more, or recompute activations (dsframe plan)")
        return 1
    sizes = f'"train_micro_batch_size_per_gpu": {best.micro_batch}, "gradient_accumulation_steps": {best.accumulation}'
    print(f"\nwrite {sizes}")
    return 0


def _candidates(config: Config, processes: int) -> Iterator[tuple[int, int]]:
    """Sizes of a micro-batch, with the accumulation steps that keep the global batch. Raises TaskError where there is none."""
    batch = config.batch(processes)
    each = batch.train_batch_size // batch.data_parallel_size
    if batch.train_batch_size % batch.data_parallel_size:
        raise TaskError(f"train_batch_size {batch.train_batch_size} is no multiple of {batch.data_parallel_size} ranks")
    for size in range(1, each + 1):
        if each % size == 0:
            yield size, each // size


def _try(options: argparse.Namespace, micro_batch: int, accumulation: int, limit: float | None) -> Try:
    directory = options.out / f"micro-batch-{micro_batch}"
    changes = [
        f"train_micro_batch_size_per_gpu={micro_batch}",
        f"gradient_accumulation_steps={accumulation}",
        f"dsframe.steps={STEPS}",
        "dsframe.log_every_steps=1",
        "dsframe.eval_samples=1",
        "dsframe.checkpoints.at_end=false",
        "dsframe.checkpoints.every_steps=null",
    ]
    overrides = [*options.overrides, *changes]
    try:
        subprocess_runs.train(Path(options.config), options.processes, directory, overrides=overrides)
    except TrainingError as error:
        if not _OUT_OF_MEMORY.search(str(error)):
            raise
        return Try(micro_batch, accumulation, fits=False, why="out of memory")
    summary = read_summary(directory)
    peak = max(summary["peak_memory_bytes"])
    fits = limit is None or peak <= limit
    return Try(micro_batch, accumulation, fits, peak, summary["rate"], "" if fits else f"more than {options.memory}")


def _told(one: Try) -> str:
    peak = "" if one.peak_bytes is None else f"{one.peak_bytes / 2**20:,.0f} MiB"
    return ", ".join(part for part in (peak, one.why) if part)

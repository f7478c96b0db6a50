"""What one training step of a GPT in bf16 asks of a GPU, counted without one: operators, bytes, FLOPs and host time.

    python -m benchmarks.step_counts                # 350 M and 1.3 billion parameters, as in benchmarks.gpu
    python -m benchmarks.step_counts --size tiny

Forward and backward pass are run on torch's meta device at their true size, as ``dsframe plan`` does: of every operator that is no
view, its FLOPs and the bytes that it reads and writes, none of them fused with another. The update is that of the engine for one
process, on the CPU, with as many layers of a small width: the operators that it calls are the same, and their bytes grow with the
parameters. An operator over a list of tensors, such as fused AdamW, counts once. Host time is that of whole steps of this small
model, whose kernels take next to nothing: Python, autograd and torch's dispatcher, on this machine's processor with one thread. The
last columns are divisions, not measurements: FLOPs and bytes by an H100's peaks in ``dsframe.tools.plan.hardware``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import islice
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import ADAMW, BF16, SIZES
from benchmarks.overhead import engine_of
from dsframe import tasks
from dsframe.config import Config, load
from dsframe.text import columns
from dsframe.tools.plan import hardware, trace

STEPS = 10
NARROW = {"width": 64, "context": 16, "samples": 8, "batch": 1}


def file_of(shape: dict[str, int]) -> dict[str, Any]:
    """The file of a GPT of ``shape``."""
    task = {"name": "language", "corpus": "synthetic", "samples": 8, "tie_embeddings": False}
    task |= {name: value for name, value in shape.items() if name != "batch"}
    optimizer = {"type": "AdamW", "params": ADAMW}
    document = {"train_batch_size": shape["batch"], "gradient_clipping": 1.0, "optimizer": optimizer, **BF16}
    return {**document, "dsframe": {"engine": "single", "task": task}}


def passes(config: Config, rows: int) -> tuple[int, int, float, float, int]:
    """Operators of the forward and of the backward pass, FLOPs, bytes, and parameters."""
    model = trace.traced(config, tasks.build(config.settings.task, config.settings.seed))
    works = [(segment.forward, segment.backward) for segment in (*model.segments, model.loss)]
    both = [work for pair in works for work in pair]
    flops, moved = (sum(float(getattr(work, name)(rows).sum()) for work in both) for name in ("flops", "moved"))
    return (
        sum(len(one.table) for one, _ in works),
        sum(len(other.table) for _, other in works),
        flops,
        moved,
        model.parameters,
    )


class Counted(trace.OperationTable):
    """Operators and bytes of what runs in the functions that it is given."""

    def of(self, function: Any) -> Any:
        """``function``, counted."""

        def counted(*arguments: Any) -> Any:
            with self:
                return function(*arguments)

        return counted


def update(shape: dict[str, int]) -> tuple[int, float, float]:
    """Operators of a small model's update, the bytes that they move for each parameter, and seconds of a whole step."""
    document = file_of({**shape, **NARROW})
    settings = load(document).settings
    engine, batches = engine_of("single", tasks.build(settings.task, settings.seed), document)
    inner: Any = engine
    engine.train_step(islice(batches, 1))
    seen = Counted(None)
    takes = mock.patch.object(inner._masters, "take_gradients", seen.of(inner._masters.take_gradients))
    with takes, mock.patch.object(inner, "_update", seen.of(inner._update)):
        engine.train_step(islice(batches, 1))
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.train_step(islice(batches, 1))
        times.append(time.perf_counter() - began)
    moved = sum(one[1] for one in seen.operations)
    parameters = sum(parameter.numel() for parameter in inner.model.parameters())
    return len(seen.operations), moved / parameters, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="only this one (default: 350m and 1.3b)")
    sizes = [size] if (size := parser.parse_args().size) else ["350m", "1.3b"]
    torch.set_num_threads(1)
    h100 = hardware.TABLE["h100"]
    heads = "size,parameters,tokens,operators forward,backward,update,GB passes,update,TFLOP,host ms,least ms products,memory"
    rows = [heads.split(",")]
    for size in sizes:
        shape = SIZES[size]
        forward, backward, flops, moved, parameters = passes(load(file_of(shape)), shape["batch"])
        calls, bytes_each, seconds = update(shape)
        own = bytes_each * parameters
        counts = [f"{count:,}" for count in (forward, backward, calls)]
        figures = (moved / 1e9, own / 1e9, flops / 1e12, seconds * 1e3)
        least = (flops / h100.flops_short * 1e3, (moved + own) / h100.memory_bandwidth * 1e3)
        tokens = shape["batch"] * shape["context"]
        rows.append(
            [size, f"{parameters / 1e6:,.1f} M", f"{tokens:,}", *counts, *(f"{one:,.4g}" for one in (*figures, *least))]
        )
    print(*columns(rows, left=1), sep="\n")


if __name__ == "__main__":
    main()

"""Saving and loading a GPT of 100 M parameters: seconds and bytes beside the disk and torch.save, memory, and who waits.

    python -m benchmarks.checkpoint                                       # one process
    torchrun --nproc-per-node=2 -m benchmarks.checkpoint --engine ddp     # ranks write in parallel
    torchrun --nproc-per-node=2 -m benchmarks.checkpoint --engine deepspeed --stage 3

Rank 0 prints the table. Everything is written to --folder (default: the temporary folder) and removed. "Extra memory" is the most
that the resident set of any one rank grew while saving. Files are forced to the disk before a clock stops, and put out of the page
cache before they are read.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsframe import engines, optimizers, schedules, tasks
from dsframe import world as worlds
from dsframe.config import Facts, load
from dsframe.run import settle_threads

CHUNK = 64 << 20


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", default="single")
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    world = worlds.here()
    document = {
        "train_batch_size": world.size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": options.stage},
        "dsframe": {
            "engine": options.engine,
            "threads_per_rank": 1,
            "task": {
                "name": "language",
                "layers": options.layers,
                "width": options.width,
                "heads": 12,
                "context": 32,
                "corpus": "synthetic",
                "samples": 64,
            },
        },
    }
    config = load(document)
    settle_threads(world, 1)
    import torch

    from dsframe.checkpoint.saver import Saver
    from dsframe.checkpoint.share import share
    from dsframe.checkpoint.store import Retention, Store
    from dsframe.data import Loader
    from dsframe.engine import Plan
    from dsframe.process_group import device_of

    task, batch, device = tasks.build(config.settings.task, 0), config.batch(world.size), device_of(world)
    config = config.resolve(Facts(world_size=world.size, total_steps=9, hidden_size=None))
    optimizer = optimizers.read(config)
    plan = Plan(config, world, task, optimizer, schedules.constant(1e-4), batch, device)
    engine = engines.load(engines.choose(config, world.launcher).name, config)(plan)
    loader = Loader(
        task.train_data(),
        seed=0,
        micro_batch_size=batch.micro_batch_size,
        rank=world.rank,
        ranks=world.size,
        device=device,
    )
    step = 0

    def train() -> None:
        nonlocal step
        float(engine.train_step(loader.micro_batches(step)).loss)
        step += 1

    train()
    train()
    folder = Path(share(engine, str(options.folder / f"dsframe-benchmark-{os.getpid()}"))[0])
    rows: list[tuple[str, str, str, str]] = []

    def saved(asynchronous: bool) -> Path:
        """Saves once; the figures of the slowest rank."""
        name = "in the background" if asynchronous else "at once"
        saver = Saver(
            engine,
            Store(folder / name.replace(" ", "-")),
            {"training": {}, "run": {}},
            every_steps=None,
            at_end=True,
            retention=Retention(),
            asynchronous=asynchronous,
            say=lambda line: None,
        )
        share(engine, "")
        before, began = settle_memory(), time.perf_counter()
        stall = saver.save(step, loss=None, evaluation={})
        steps = 0
        while asynchronous and saver._writing is not None and saver._writing[1]._thread.is_alive() and world.size == 1:
            train()
            steps += 1
        saver.settle()
        seconds, grown = time.perf_counter() - began, peak_memory() - before
        told = [[float(part) for part in line.split()] for line in share(engine, f"{stall} {seconds} {grown}")]
        stall, seconds, grown = (max(column) for column in zip(*told, strict=True))
        path = Store(folder / name.replace(" ", "-")).newest_first()[0]
        during = f", {steps} steps meanwhile" if steps else ""
        rows.append((f"dsframe, {name}", figure(size(path), seconds), f"{stall:.2f} s{during}", memory(grown)))
        return path

    path = saved(False)
    saved(True)
    from dsframe.checkpoint import store
    from dsframe.checkpoint.portable import Checkpoint

    forget(path)
    share(engine, "")
    began = time.perf_counter()
    wrong = store.verify(path, sorted(store.read_manifest(path)["files"])[world.rank :: world.size])
    verified = time.perf_counter()
    assert not wrong
    checkpoint = Checkpoint(path, world.rank)
    engine.load_state(checkpoint)
    share(engine, "")
    rows.append(("dsframe, verify", figure(size(path), verified - began), "", ""))
    rows.append(("dsframe, load", figure(size(path), time.perf_counter() - verified), "", ""))
    if world.is_main:
        rows = [*disk(folder / "disk", size(path)), *torchs(folder / "torch.pt", checkpoint), *rows]
        count = sum(torch.Size(shape).numel() for shape in checkpoint.shapes.values())
        print(f"{engine.description}, {world.size} rank(s), {count / 1e6:.1f} M parameters with Adam, {folder.parent}")
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in (("", "MB in s (MB/s)", "training waits", "extra memory"), *rows):
            print("  ".join(f"{cell:<{max(width, 14)}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    checkpoint.close()
    share(engine, "")
    if world.is_main:
        shutil.rmtree(folder)
    engine.close()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads at times abort a regular exit


def disk(path: Path, count: int) -> list[tuple[str, str, str, str]]:
    """The disk's own pace for as many bytes."""
    block = os.urandom(CHUNK)

    def write() -> None:
        with path.open("wb") as file:
            for _ in range(-(-count // CHUNK)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def read() -> None:
        with path.open("rb") as file:
            while file.read(CHUNK):
                pass

    wrote = timed(write)
    forget(path.parent)
    length = path.stat().st_size
    rows = [("disk, write", figure(length, wrote), "", ""), ("disk, read", figure(length, timed(read)), "", "")]
    path.unlink()
    return rows


def torchs(path: Path, checkpoint: Any) -> list[tuple[str, str, str, str]]:
    """torch.save and torch.load of the same tensors."""
    import torch

    kept: dict[str, torch.Tensor] = {}
    for name in checkpoint.shapes:
        one = checkpoint.parameter(name)
        kept |= {f"{key}/{name}": tensor.clone() for key, tensor in (("weight", one.weight), *one.moments.items())}

    def save() -> None:
        torch.save(kept, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    before = settle_memory()
    wrote = timed(save)
    grown, count = peak_memory() - before, path.stat().st_size
    forget(path.parent)
    rows = [("torch.save", figure(count, wrote), f"{wrote:.2f} s", memory(grown))]
    rows.append(("torch.load", figure(count, timed(lambda: torch.load(path, weights_only=True))), "", ""))
    path.unlink()
    return rows


def timed(action: Callable[[], Any]) -> float:
    """Seconds."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def size(path: Path) -> int:
    """Bytes of a folder."""
    return sum(file.stat().st_size for file in path.iterdir())


def forget(folder: Path) -> None:
    """Puts the files of a folder out of the page cache."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settle_memory() -> int:
    """The resident set now, from which :func:`peak_memory` counts; bytes. Linux: 5 in clear_refs resets the peak (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> int:
    """The largest resident set since :func:`settle_memory`; bytes."""
    return _status("VmHWM")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def figure(count: float, seconds: float) -> str:
    return f"{count / 1e6:,.0f} in {seconds:.2f} ({count / 1e6 / seconds:,.0f})"


def memory(count: float) -> str:
    return f"{max(count, 0) / 2**20:,.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())

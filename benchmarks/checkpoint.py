"""Saving and loading a GPT of 100 M parameters: seconds and bytes beside the disk, torch.save,
torch.distributed.checkpoint and DeepSpeed's own save, memory, and who waits.

    python -m benchmarks.checkpoint                                       # one process
    torchrun --nproc-per-node=2 -m benchmarks.checkpoint --engine ddp     # ranks write in parallel
    torchrun --nproc-per-node=2 -m benchmarks.checkpoint --engine deepspeed --stage 3
    python -m benchmarks.checkpoint --width 2048 --layers 40 --optimizer SGD --at-once       # 2 B parameters in 24 GiB

Rank 0 prints the table: medians of --rounds, in which everything is done once, in turn (a disk is slower where it was not
written before, and the machine has other things to do). Everything is written to --folder (default: the temporary folder) and
removed. "Extra memory" is the most that the resident set of any one rank grew while saving, where training runs meanwhile beyond
what a step of training takes. Files are forced to the disk before
a clock stops, and put out of the page cache before they are read; verifying reads them into it again, as it does before a resume.
"""

import argparse
import gc
import math
import os
import shutil
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from statistics import median

from dsframe import engines, tasks
from dsframe.cluster import world as worlds
from dsframe.config import Facts, load
from dsframe.model import optimizers, schedules
from dsframe.model.micro_batch import MicroBatch
from dsframe.run import settle_threads

CHUNK = 64 << 20
OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-4}},
    "momentum": {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.9}},
    "SGD": {"type": "SGD", "params": {"lr": 1e-4}},
}
STEPS_BEFORE = 3
"""Steps from a run's start to its first save: a thread makes memory ready meanwhile."""


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", default="single")
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--optimizer", default="AdamW", choices=tuple(OPTIMIZERS), help="two moments, one, or none")
    parser.add_argument("--at-once", action="store_true", help="nothing in the background, which takes a copy's memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    world = worlds.here()
    threads = settle_threads(world, None)
    document = {
        "train_batch_size": world.size,
        "optimizer": OPTIMIZERS[options.optimizer],
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": options.stage},
        "dsframe": {
            "engine": options.engine,
            "threads_per_rank": threads,
            "task": {
                "name": "language",
                "layers": options.layers,
                "width": options.width,
                "heads": max(1, options.width // 64),
                "context": 32,
                "corpus": "synthetic",
                "samples": 64,
            },
        },
    }
    config = load(document)
    import torch

    from dsframe.checkpoint.saver import Saver
    from dsframe.checkpoint.store import Retention, Store
    from dsframe.cluster.exchange import all_gather_text
    from dsframe.cluster.process_group import device_of
    from dsframe.data import Loader
    from dsframe.model.plan import Plan

    task, batch, device = tasks.build(config.settings.task, 0), config.batch(world.size), device_of(world)
    config = config.resolve(Facts(world_size=world.size, total_steps=9))
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

    def train():
        nonlocal step
        float(engine.train_step(MicroBatch.of(loader.micro_batches(step))).loss)
        step += 1

    train()
    train()
    folder = Path(all_gather_text(engine, str(options.folder / f"dsframe-benchmark-{os.getpid()}"))[0])
    table = Table()

    savers = {}

    def saved(asynchronous):
        """Saves once; the figures of the slowest rank."""
        name = "in the background" if asynchronous else "at once"
        all_gather_text(engine, "")  # others may still be reading
        if world.is_main:
            shutil.rmtree(folder / "ours", ignore_errors=True)
        saver = savers.get(asynchronous) or Saver(
            engine,
            Store(folder / "ours"),
            {"training": {}, "run": {}},
            every_steps=Fraction(1),
            at_end=True,
            retention=Retention(),
            asynchronous=asynchronous,
            say=lambda line: None,
        )
        if asynchronous and asynchronous not in savers:
            name += ", first of a run"  # what it copies to stays for the next
            saver.prepare()
            for _ in range(STEPS_BEFORE):
                train()
        savers[asynchronous] = saver
        trains = asynchronous and world.size == 1
        before = settle_memory()
        if trains:
            train()
            before = peak_memory()
        all_gather_text(engine, "")
        began = time.perf_counter()
        stall = saver.save(step, loss=None, evaluation={})
        while trains and saver._writing is not None and saver._writing[1]._thread.is_alive():
            train()
        saver.settle()
        seconds, grown = time.perf_counter() - began, peak_memory() - before
        told = [
            [float(part) for part in line.split()] for line in all_gather_text(engine, f"{stall} {seconds} {grown}")
        ]
        stall, seconds, grown = (max(column) for column in zip(*told, strict=True))
        path = Store(folder / "ours").newest_first()[0]
        table.add(f"dsframe, {name}", size(path), seconds, stall, grown)
        return path

    def loaded(path):
        """Verifies and loads, each rank its own."""
        forget(path)
        all_gather_text(engine, "")
        began = time.perf_counter()
        wrong = store.damage(path, None, (world.rank, world.size))
        all_gather_text(engine, "")
        verified = time.perf_counter()
        assert not wrong
        checkpoint = Checkpoint(path, world.rank)
        engine.load_state(checkpoint)
        all_gather_text(engine, "")
        table.add("dsframe, verify (from the disk)", size(path), verified - began)
        table.add("dsframe, load (cached by then)", size(path), time.perf_counter() - verified)
        checkpoint.close()

    from dsframe.checkpoint import store
    from dsframe.checkpoint.reader import Checkpoint

    path = saved(asynchronous=False)
    table.clear()
    checkpoint = Checkpoint(path)
    kept = live(engine) if world.size == 1 else {}
    if world.is_main and world.size > 1:
        kept = everything(checkpoint)
    count = sum(torch.Size(shape).numel() for shape in checkpoint.shapes.values())
    checkpoint.close()
    for _ in range(options.rounds):
        for asynchronous in (False,) if options.at_once else (False, True):
            distributed(engine, folder / "dcp", table, asynchronous)
        deepspeeds(engine, folder / "deepspeed", table)
        if world.is_main:
            disk(folder / "disk", sum(tensor.nbytes for tensor in kept.values()), table)
            torchs(folder / "torch.pt", kept, table)
        path = saved(False)
        loaded(path if options.at_once else saved(True))
    if world.is_main:
        sizes = f"{world.size} rank(s) of {threads} thread(s), {count / 1e6:.1f} M parameters"
        print(f"{engine.description}, {sizes} with {optimizer.kind}")
        table.show()
    all_gather_text(engine, "")
    if world.is_main:
        shutil.rmtree(folder)
    engine.close()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads at times abort a regular exit


class Table:
    """What was done, how often, and what came out."""

    def __init__(self):
        self._found = {}

    def add(self, name, count, seconds, waits=None, grown=None):
        """``count`` bytes in ``seconds``, while training waited and the resident set grew."""
        self._found.setdefault(name, []).append((count, seconds, waits, grown))

    def clear(self):
        """Forgets what was the first time."""
        self._found.clear()

    def show(self):
        """Prints medians of the seconds and the largest growth."""
        rows = [("", "MB", "s", "MB/s", "training waits, s", "extra memory, MiB")]
        for name, found in self._found.items():
            count, seconds = found[0][0], median(one[1] for one in found)
            waits = [one[2] for one in found if one[2] is not None]
            grown = [one[3] for one in found if one[3] is not None]
            rows.append(
                (
                    name,
                    f"{count / 1e6:,.0f}",
                    f"{seconds:.2f}",
                    f"{count / 1e6 / seconds:,.0f}",
                    f"{median(waits):.2f}" if waits else "",
                    f"{max(0.0, *grown) / 2**20:,.0f}" if grown else "",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def everything(checkpoint):
    """All tensors of a checkpoint, in memory."""
    kept = {}
    for name in checkpoint.shapes:
        one = checkpoint.parameter(name)
        kept |= {f"{key}/{name}": tensor.clone() for key, tensor in (("weight", one.weight), *one.moments.items())}
    return kept


def live(engine):
    """What this rank holds, where it lies."""
    shards = engine.state().parameters.shards
    return {f"{key}/{shard.name}": of.read().detach() for shard in shards for key, of in shard.tensors.items()}


def disk(path, count, table):
    """The disk's own pace for as many bytes."""
    block = os.urandom(CHUNK)

    def write():
        with path.open("wb") as file:
            for _ in range(-(-count // CHUNK)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def read():
        with path.open("rb") as file:
            while file.read(CHUNK):
                pass

    wrote = timed(write)
    forget(path.parent)
    length = path.stat().st_size
    table.add("disk, write", length, wrote)
    table.add("disk, read", length, timed(read))
    path.unlink()


def torchs(path, kept, table):
    """torch.save and torch.load of the same tensors."""
    import torch

    def save():
        torch.save(kept, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    before = settle_memory()
    wrote = timed(save)
    grown, count = peak_memory() - before, path.stat().st_size
    forget(path.parent)
    table.add("torch.save", count, wrote, wrote, grown)
    table.add("torch.load", count, timed(lambda: torch.load(path, weights_only=True)))
    path.unlink()


def distributed(engine, folder, table, asynchronous):
    """**Collective.** torch.distributed.checkpoint, at once or in the background, of the ranges that each rank holds."""
    import torch.distributed.checkpoint as dcp
    from torch import distributed

    from dsframe.cluster.exchange import all_gather_text

    if not distributed.is_initialized():
        return
    world, parameters = engine.plan.world, engine.state().parameters
    shards = getattr(parameters, "shards", ())
    held = {(shard.name, key): of for shard in shards for key, of in shard.tensors.items() if of.size}
    # What all hold has one name, and is dealt out; ranges have one for each rank.
    state = {
        f"{key}/{name}" + f"/{world.rank}" * (of.size < math.prod(of.shape)): of.read()
        for (name, key), of in held.items()
    }
    if world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    all_gather_text(engine, "")
    before = settle_memory()
    all_gather_text(engine, "")
    began = time.perf_counter()
    if asynchronous:
        writing = dcp.async_save(state, checkpoint_id=folder, process_group=distributed.new_group(backend="gloo"))
        stall = time.perf_counter() - began
        writing.result()
    else:
        dcp.save(state, checkpoint_id=folder)
        stall = time.perf_counter() - began
    facts = f"{stall} {time.perf_counter() - began} {peak_memory() - before}"
    told = [[float(part) for part in line.split()] for line in all_gather_text(engine, facts)]
    stall, seconds, grown = (max(column) for column in zip(*told, strict=True))
    how = "in the background" if asynchronous else "at once"
    table.add(f"torch.distributed.checkpoint, {how}", size(folder), seconds, stall, grown)


def deepspeeds(engine, folder, table):
    """**Collective.** ``save_checkpoint`` of DeepSpeed's engine: a file for each rank."""
    from dsframe.cluster.exchange import all_gather_text

    if not engine.description.startswith("DeepSpeed"):
        return
    if engine.plan.world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    all_gather_text(engine, "")
    before = settle_memory()
    all_gather_text(engine, "")
    began = time.perf_counter()
    engine._engine.save_checkpoint(str(folder), tag="step")
    for path in folder.glob(f"step/*rank_{engine.plan.world.rank}_*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    facts = f"{time.perf_counter() - began} {peak_memory() - before}"
    told = [[float(part) for part in line.split()] for line in all_gather_text(engine, facts)]
    seconds, grown = (max(column) for column in zip(*told, strict=True))
    table.add("DeepSpeed's save_checkpoint", size(folder / "step"), seconds, seconds, grown)


def timed(action):
    """Seconds."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def size(path):
    """Bytes of a folder."""
    return sum(file.stat().st_size for file in path.iterdir())


def forget(folder):
    """Puts the files of a folder out of the page cache."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settle_memory():
    """The resident set now, from which :func:`peak_memory` counts; bytes. Linux: 5 in clear_refs resets the peak (proc(5)).

    Called before each clock: Python's collection of all objects takes 0.25 s here, and would fall into any of them.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory():
    """The largest resident set since :func:`settle_memory`; bytes."""
    return _status("VmHWM")


def _status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())

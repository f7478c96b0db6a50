"""What ranks do beside training, by their number: they meet, agree, tell, stop and leave. On this machine, with nothing to compute.

    python -m benchmarks.many_ranks                 # 2, 8, 16, 32 and 64 ranks
    python -m benchmarks.many_ranks --ranks 2,8

Processes are forked from one that has imported torch, so that 64 of them fit; they share the cores, so that times by the clock are
an upper bound, and what a rank sends and asks of the store says how it grows. Milliseconds by the clock of the slowest rank;
"asks" are requests of dsframe's to the rendezvous' store, of rank 0 and of any other; "bytes" are those that a rank's all-reduces
hold (a ring sends them about twice). Gloo's own requests, when it connects all pairs, are not counted.

The second table is of a whole training: two steps of ten parameters, a checkpoint, the end.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
import torch.distributed as dist

from benchmarks.overhead import document
from dsframe import run, train
from dsframe.checkpoint.saver import Saver
from dsframe.cluster import agreement, exchange, process_group
from dsframe.cluster.rendezvous import free_port
from dsframe.cluster.world import World
from dsframe.engines import ddp
from dsframe.guard.watchdog import Watchdog
from dsframe.trainer import Trainer

IMPORTED = (run, ddp)
"""Before ranks are forked: what they wait for is each other, not 64 imports on two cores."""
RUN = ("watchdog", "two steps", "save", "settle", "run")
PHASES = ("meet and connect", "same facts", "no failures", "different texts", "agree to stop", "leave")
FACTS = {f"version of package {number}": "1.2.3" for number in range(30)}
"""About what ``job`` compares at the start: a kilobyte."""
asked = Counter()
summed = Counter()


class CountedStore(process_group.PrefixStore):
    """A store that counts what it is asked."""


def _counted(name):
    asks = getattr(process_group.PrefixStore, name)

    def call(self, *arguments):
        asked[name] += 1
        return asks(self, *arguments)

    return call


for _name in ("set", "get", "add", "check", "wait"):
    setattr(CountedStore, _name, _counted(_name))


def rank_of(world, port, folder):
    """One rank; writes seconds, requests and bytes of each phase to ``folder``."""
    torch.set_num_threads(1)
    process_group.PrefixStore = CountedStore
    found = {}
    current = ""

    def sum_over_ranks(values):
        summed[current] += values.nbytes
        return process_group.sum_over_ranks(values)

    device = torch.device("cpu")
    ranks = SimpleNamespace(plan=SimpleNamespace(world=world, device=device), sum_over_ranks=sum_over_ranks)
    work = {
        "meet and connect": lambda: process_group.open_process_group(world, device),
        "same facts": lambda: agreement.assert_engines_agree(ranks, FACTS),
        "no failures": lambda: exchange.failures(ranks, ""),
        "different texts": lambda: exchange.all_gather_text(ranks, f"rank {world.rank} of a save".ljust(200)),
        "agree to stop": lambda: sum_over_ranks(torch.zeros(2)),
        "leave": process_group.close_process_group,
    }
    for current in PHASES:
        before, began = sum(asked.values()), time.perf_counter()
        work[current]()
        found[current] = (time.perf_counter() - began, sum(asked.values()) - before, summed[current])
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


def training_of(world, port, folder):
    """One rank of a training; writes what :func:`rank_of` does."""
    os.environ.update(
        RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.rank), LOCAL_WORLD_SIZE=str(world.size),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="many-ranks",
    )  # fmt: skip
    torch.set_num_threads(1)
    process_group.PrefixStore = CountedStore
    found = {}
    total = process_group.sum_over_ranks

    def counted(values):
        summed["all"] += values.nbytes
        return total(values)

    process_group.sum_over_ranks = counted

    def timed(name, work):
        def call(*arguments, **options):
            before, sent, began = sum(asked.values()), summed["all"], time.perf_counter()
            result = work(*arguments, **options)
            seconds, requests, size = found.get(name, (0.0, 0, 0))
            seconds += time.perf_counter() - began
            found[name] = (seconds, requests + sum(asked.values()) - before, size + summed["all"] - sent)
            return result

        return call

    parts = ((Watchdog, "__init__"), (Trainer, "_train_step"), (Saver, "save"), (Saver, "settle"))
    for name, (owner, method) in zip(RUN, parts, strict=False):
        setattr(owner, method, timed(name, getattr(owner, method)))
    arguments = ["--config", str(folder / "file.json"), "--run-dir", str(folder / "run"), "--quiet"]
    timed("run", train.main)(None, arguments)
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


def measure(size, work=rank_of):
    """Of ``size`` ranks, by phase: seconds of the slowest, requests of rank 0 and of the busiest other, bytes of a rank."""
    port = free_port()
    with TemporaryDirectory() as name:
        folder, children = Path(name), []
        section = {"task": {"name": "benchmarks.overhead:ManyTask"}, "engine": "ddp", "steps": 2}
        (folder / "file.json").write_text(json.dumps(document(size) | {"dsframe": section}))
        for rank in range(size):
            world = World(
                rank=rank, size=size, local_rank=rank, local_size=size, launcher="torchrun",
                master_address="127.0.0.1", master_port=port,
            )  # fmt: skip
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    work(world, port, folder)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        ended = [os.waitpid(child, 0)[1] for child in children]  # all of them
        if any(ended):
            raise SystemExit(f"a rank of {size} failed")
        told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return {
        phase: (
            max(one[phase][0] for one in told),
            told[0][phase][1],
            max(one[phase][1] for one in told[1:]),
            max(one[phase][2] for one in told),
        )
        for phase in told[0]
    }


def main(argv=None):
    """Prints the table. Returns 1 where what a rank asks or sends for things that are alike grows with the number of ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,8,16,32,64")
    sizes = [int(size) for size in parser.parse_args(argv).ranks.split(",")]
    found = {size: measure(size) for size in sizes}
    trained = {size: measure(size, training_of) for size in sizes}
    for title, of, phases in (("", found, PHASES), ("of a training: ", trained, RUN)):
        print(f"{title + 'ms; asks of rank 0, of others; bytes':<52}" + "".join(f"{size:>26}" for size in sizes))
        for phase in phases:
            cells = (of[size][phase] for size in sizes)
            row = "".join(f"{cell[0] * 1e3:>10.1f}; {cell[1]}, {cell[2]}; {cell[3]:<8}" for cell in cells)
            print(f"{phase:<52}{row}")
    least, most = found[min(sizes)], found[max(sizes)]
    grown = [phase for phase in ("same facts", "no failures", "agree to stop") if most[phase][3] > least[phase][3]]
    few, many = trained[min(sizes)], trained[max(sizes)]
    grown += [name for name in ("save", "settle") if many[name][3] > few[name][3] or many[name][2] > few[name][2]]
    grown += ["meet and connect"] * (most["meet and connect"][2] > least["meet and connect"][2])
    print(f"constant for each rank: {'no: ' + ', '.join(grown) if grown else 'yes'}")
    return int(bool(grown) or not dist.is_available())


if __name__ == "__main__":
    sys.exit(main())

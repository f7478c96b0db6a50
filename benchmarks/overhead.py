"""What a step costs beside the model's arithmetic, against the number of parameter tensors and of processes.

    python -m benchmarks.overhead                          # 10, 100 and 1,000 tensors; 1, 2, 4 and 8 processes
    python -m benchmarks.overhead --processes 2 --engines ddp

The model is one operation over all its parameters (4 numbers each), so that whatever takes longer is not the model. Each engine
beside the loop that one writes by hand with the same library, optimizer (fused AdamW) and clipping, in the same processes and in
turns; dsframe's figure includes its loader. Microseconds a step, the median of the rounds, by the clock and by the processor time
of rank 0, which a neighbour on the machine changes less; the model's forward and backward pass alone are taken off both.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dsframe
from benchmarks import processes
from dsframe import engines
from dsframe.cluster import process_group, world
from dsframe.config import Facts, load
from dsframe.data import Loader
from dsframe.model import optimizers, schedules
from dsframe.model.micro_batch import MicroBatch
from dsframe.model.plan import Plan
from dsframe.train import leave_at_once

ENGINES = ("ddp", "zero1", "zero3")
OPTIONS = {"lr": 1e-3, "weight_decay": 0.01, "fused": True}
ROWS = 8
CLOCKS = {"": time.perf_counter, ", processor": time.process_time}
"""What the names of a row's figures end with, and the clock."""


class Many(nn.Module):
    """``count`` parameters in one operation."""

    def __init__(self, count):
        super().__init__()
        self.weights = [nn.Parameter(torch.full((4,), 0.1 + number)) for number in range(count)]
        for number, weight in enumerate(self.weights):
            self.register_parameter(f"w{number}", weight)

    def forward(self, rows):
        return rows.mean() * torch.stack(torch._foreach_norm(self.weights)).sum()


class ManyTask(dsframe.Task):
    """The model, and data of which nothing depends."""

    count = 10

    def model(self):
        return Many(self.count)

    def loss(self, outputs, targets):
        return outputs * targets.mean()

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.ones(1024, 3), torch.ones(1024))


def engine_of(name, task, document):
    """**Collective.** The engine that trains ``task`` on this rank, and its micro-batches."""
    here = world.here()
    replicas = not name.startswith("zero")
    if not replicas:
        document = {"zero_optimization": {"stage": int(name[-1])}, **document}
    config = load(document).resolve(Facts(here.size, 1000, None, replicas=replicas))
    batch, rate = config.batch(here.size, replicas=replicas), schedules.constant(1e-3)
    plan = Plan(config, here, task, optimizers.read(config), rate, batch, process_group.device_of(here))
    engine = engines.load(name if replicas else "deepspeed", config)(plan)
    size = batch.micro_batch_size
    loader = Loader(task.train_data(), seed=0, micro_batch_size=size, rank=here.rank, ranks=here.size)
    return engine, loader.stream()


def document(rows):
    """A file for a global batch of ``rows``."""
    return {
        "train_batch_size": rows,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    }


def ours(name, count):
    """dsframe's step."""
    task = ManyTask()
    task.count = count
    engine, stream = engine_of(name, task, document(ROWS * world.here().size))
    return lambda: engine.train_step(MicroBatch.of([next(stream)]))


def by_hand(name, count):
    """The loop of the library's own manual, without a loader."""
    model, rows = Many(count), torch.ones(ROWS, 3)
    if name == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)

        def step():
            optimizer.zero_grad()
            wrapped(rows).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step
    from dsframe.engines.deepspeed.imports import deepspeed

    size = dist.get_world_size()
    section = {"type": "Adam", "params": {**OPTIONS, "torch_adam": True}}
    file = {**document(ROWS * size), "optimizer": section, "zero_optimization": {"stage": int(name[-1])}}
    engine, *_ = deepspeed.initialize(model=model, config=file, dist_init_required=False)

    def deepspeed_step():
        engine.backward(engine(rows))
        engine.step()

    return deepspeed_step


def alone(count):
    """Forward and backward."""
    model, rows = Many(count), torch.ones(ROWS, 3)

    def step():
        model.zero_grad()
        model(rows).backward()

    return step


def measure(counts, names, rounds, steps):
    """**Collective.** Microseconds a step, by engine and number of tensors."""
    found = []
    for name in names:
        for count in counts:
            ways = {"alone": alone(count), "by hand": by_hand(name, count), "dsframe": ours(name, count)}
            taken = {(way, by): [] for way in ways for by in CLOCKS}
            for turn in range(rounds + 1):  # the first is for warming up
                for way in list(ways)[:: 1 if turn % 2 else -1]:
                    dist.barrier()
                    began = {by: clock() for by, clock in CLOCKS.items()}
                    for _ in range(steps):
                        ways[way]()
                    for by, clock in CLOCKS.items() if turn else ():
                        taken[way, by].append((clock() - began[by]) / steps * 1e6)
            middle = {key: statistics.median(times) for key, times in taken.items()}
            row = {"engine": name, "processes": dist.get_world_size(), "tensors": count}
            for by in CLOCKS:
                row |= {f"{way}{by}": round(middle[way, by] - middle["alone", by]) for way in ("by hand", "dsframe")}
            found.append(row)
    return found


def as_rank(measured):
    """Calls ``measured`` on one rank, in one process group for all of it, and gives its rows to :func:`of_ranks`."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    here = world.here()
    process_group.open_process_group(here, process_group.device_of(here))
    process_group.open_process_group = lambda *_: None
    found = measured()
    dist.barrier()
    if here.is_main:
        print("RESULT " + json.dumps(found), flush=True)
    leave_at_once(0)


def of_ranks(module, count, timeout):
    """Starts ``module`` with this process's options as ``count`` ranks; the rows that they have measured. Raises SystemExit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["-m", module, "--worker", *sys.argv[1:]]
    done = processes.run(command, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"})
    said = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not said:
        raise SystemExit(
            f"{count} processes: nothing was measured (code {done.returncode})\n{done.stdout}{done.stderr}"
        )
    return json.loads(said[0].removeprefix("RESULT "))


def main():
    """Starts torchrun for each number of processes and prints one table; with ``--json FILE`` writes it too."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", default="1,2,4,8")
    parser.add_argument("--tensors", default="10,100,1000")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        counts = [int(count) for count in arguments.tensors.split(",")]
        as_rank(lambda: measure(counts, arguments.engines.split(","), arguments.rounds, arguments.steps))
    processes.heed_sigterm()
    rows = []
    print("| engine | processes | tensors | by hand, µs | dsframe, µs | the same by processor time | |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for count in arguments.processes.split(","):
        found = of_ranks("benchmarks.overhead", count, 7200)
        for row in found:
            cells = (f"{value:,}" if isinstance(value, int) else value for value in row.values())
            print(f"| {' | '.join(cells)} |", flush=True)
        rows += found
    if arguments.json:
        with Path(arguments.json).open("w", encoding="utf-8") as out:
            json.dump(rows, out, indent=1)


if __name__ == "__main__":
    main()

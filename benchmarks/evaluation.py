"""What an evaluation takes, beside a loop by hand on the same engine's model, and beside its forward passes alone.

    python -m benchmarks.evaluation                         # ddp, zero1, zero3, fsdp; two processes
    python -m benchmarks.evaluation --engines zero3 --rounds 9

The CNN on 4,096 images of 28 x 28, batches of 128. By hand: torch's DataLoader over the rank's share, ``model.eval()``, the sum of
the losses and of the right answers, one all-reduce at the end. Alone: the forward passes over batches that lie ready. All three
in turns in the same processes. "zero3 in shards" keeps no weights between uses (``stage3_max_reuse_distance`` 0): by hand they are
gathered for each batch, by dsframe once. How many times as fast dsframe is, by the clock and by the processor time of rank 0:
the median of the rounds, least to most. Fails where a median by processor time is below ``BOUND``, or where results differ.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import dsframe
from benchmarks import processes, workloads
from benchmarks.overhead import as_rank, document, engine_of, of_ranks
from dsframe.cluster import world
from dsframe.data import EvaluationLoader
from dsframe.model.micro_batch import MicroBatch
from dsframe.tasks.task import Sum, accuracy
from dsframe.training.evaluation import Evaluation

BOUND = 0.97
"""What two evaluations by the same loop differ by."""
SAMPLES, ROWS = 4096, 128
SHARDS = dict.fromkeys(
    ("stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), 0
)
ENGINES = ("ddp", "zero1", "zero3", "zero3 in shards", "fsdp")


def data():
    """The held-out images and their classes."""
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 1, 28, 28, generator=draw), torch.randint(10, (SAMPLES,), generator=draw))


class Pictures(dsframe.Task):
    """The CNN of ``ds_configs``."""

    def model(self):
        return workloads.model("cnn")

    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs, targets)

    def metrics(self, outputs, targets):
        loss = Sum(functional.cross_entropy(outputs, targets, reduction="sum"), len(targets))
        return {"loss": loss, "accuracy": accuracy(outputs, targets)}

    def train_data(self):
        return data()


def by_hand(engine, model, switch):
    """The loop that one writes; ``switch`` has the modes of training and evaluation."""
    here = engine.plan.world
    rows = torch.utils.data.Subset(data(), range(here.rank, SAMPLES, here.size))
    loader = DataLoader(rows, batch_size=ROWS)

    def evaluate():
        switch.eval()
        total = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for images, classes in loader:
                outputs = model(images)
                total[0] += functional.cross_entropy(outputs, classes, reduction="sum")
                total[1] += (outputs.argmax(1) == classes).sum()
                total[2] += len(classes)
        dist.all_reduce(total)
        switch.train()
        return {"loss": float(total[0] / total[2]), "accuracy": float(total[1] / total[2])}

    return evaluate


def alone(model, switch, here):
    """The forward passes, each over the same batch."""
    images = data().tensors[0][:ROWS]

    def passes():
        switch.eval()
        with torch.no_grad():
            for _ in range(SAMPLES // (ROWS * here.size)):
                model(images)
        switch.train()

    return passes


def measure(name, rounds):
    """**Collective.** Times as fast as the others, by clock; and how far the results are apart."""
    kind, _, shards = name.partition(" ")
    zero = {"zero_optimization": {"stage": 3, **SHARDS}} if shards else {}
    engine, stream = engine_of(kind, Pictures(), {**document(ROWS * world.here().size), **zero})
    for _ in range(3):
        engine.train_step(MicroBatch.of([next(stream)]))
    plan = engine.plan
    loader = EvaluationLoader(
        data(), seed=0, micro_batch_size=ROWS, rank=engine.plan.data_rank, ranks=engine.plan.batch.data_parallel_size
    )
    model = getattr(engine, "_engine", None) or engine.model
    ways = {
        "dsframe": Evaluation(engine, {"": loader}, lambda: None, lambda line: None).run,
        "by hand": by_hand(engine, model, model),
        "alone": alone(model, model, plan.world),
    }
    clocks = {"clock": time.perf_counter, "processor": time.process_time}
    taken = {(way, by): [] for way in ways for by in clocks}
    results = {}
    for turn in range(rounds + 1):  # the first is for warming up
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            began = {by: clock() for by, clock in clocks.items()}
            results[way] = ways[way]()
            for by, clock in clocks.items() if turn else ():
                taken[way, by].append(clock() - began[by])
    row = {"engine": name}
    for way in ("by hand", "alone"):
        for by in clocks:
            ratios = [theirs / own for theirs, own in zip(taken[way, by], taken["dsframe", by], strict=True)]
            row[f"{way}, {by}"] = (statistics.median(ratios), min(ratios), max(ratios))
    row["apart"] = max(abs(results["dsframe"][key] - results["by hand"][key]) for key in results["by hand"])
    return row


def main():
    """Starts two ranks and prints the table. Returns 1 where a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        as_rank(lambda: [measure(name, arguments.rounds) for name in arguments.engines.split(",")])
    processes.heed_sigterm()
    rows = of_ranks("benchmarks.evaluation", 2, 1200)
    columns = [name for name in rows[0] if name not in ("engine", "apart")]
    print(f"| dsframe is ... times as fast | {' | '.join(columns)} | results apart |")
    print("|---" * (len(columns) + 2) + "|")
    for row in rows:
        cells = ("{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in columns)
        print(f"| {row['engine']} | {' | '.join(cells)} | {row['apart']:.1e} |")
    broken = [row["engine"] for row in rows if row["by hand, processor"][0] < BOUND or row["apart"] > 1e-5]
    print(f"bound, {BOUND} x by hand, by processor time: {'broken by ' + ', '.join(broken) if broken else 'kept'}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())

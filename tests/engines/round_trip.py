"""What test_round_trips.py runs on every rank: five steps, a snapshot, five steps, the snapshot back, the same five again.

    python -m tests.engines.round_trip CONFIG.json

Rank 0 writes report.json: the two sets of losses and what the snapshot held.
"""

import os
import sys
from pathlib import Path

from dsframe import engines, tasks
from dsframe.cluster import world as worlds
from dsframe.config import Facts, load
from dsframe.model import optimizers, schedules
from dsframe.model.micro_batch import MicroBatch
from dsframe.run import settle_threads
from tests.files import write_json


def build(path):
    """The engine of a configuration, and what trains from one step to another and returns the losses."""
    world, config = worlds.here(), load(Path(path))
    settle_threads(world, 1)
    import torch

    from dsframe.cluster.process_group import device_of
    from dsframe.data import Loader
    from dsframe.model.plan import Plan

    torch.set_num_threads(1)
    task = tasks.build(config.settings.task, 0)
    choice = engines.choose(config, world.launcher)
    config = config.resolve(Facts(world.size, total_steps=10, replicas=choice.entry.replicas))
    batch, device = config.batch(world.size), device_of(world)
    optimizer = optimizers.read(config)
    loader = Loader(
        task.train_data(),
        seed=0,
        micro_batch_size=batch.micro_batch_size,
        accumulation_steps=batch.accumulation_steps,
        rank=batch.data_rank(world.rank),
        ranks=batch.data_parallel_size,
        device=device,
    )
    rates = schedules.build("WarmupLR", optimizer.learning_rate, {"warmup_num_steps": 6})
    plan = Plan(config, world, task, optimizer, rates, batch, device)
    engine = engines.load(choice.name, config)(plan)

    def steps(first, last):
        losses = []
        for step in range(first, last):
            result = engine.train_step(MicroBatch.of(loader.micro_batches(step)))
            losses.append(float(engine.sum_over_ranks(result.loss.reshape(1).double())) / world.size)
        return losses

    return engine, steps


def main(path):
    engine, steps = build(path)
    import torch

    from tests.engines.snapshot import Snapshot

    plan, world = engine.plan, engine.plan.world
    fresh = Snapshot(engine.state())
    first = steps(0, 5)
    generator = torch.get_rng_state()
    kept = Snapshot(engine.state())
    after = steps(5, 10)
    torch.set_rng_state(generator)
    engine.load_state(kept)
    again = Snapshot(engine.state())
    repeated = steps(5, 10)
    torch.manual_seed(1 + plan.data_rank)  # as build_model leaves it
    engine.load_state(fresh)
    from_the_start = steps(0, 5)
    weights = {name: kept.parameter(name) for name in kept.shapes}
    differences = [float((one.weight - again.parameter(name).weight).abs().max()) for name, one in weights.items()]
    report = {
        "engine": engine.description,
        "first": first,
        "from_the_start": from_the_start,
        "after": after,
        "repeated": repeated,
        "read_back": max(differences),
        "shapes": {name: list(shape) for name, shape in kept.shapes.items()},
        "moments": {name: sorted(one.moments) for name, one in weights.items()},
        "scalars": {name: one.scalars for name, one in weights.items()},
        "dtypes": sorted({str(one.weight.dtype) for one in weights.values()}),
        "updates": kept.updates,
        "seen": int(kept.buffers()["seen"]),
    }
    engine.close()
    if world.is_main:
        write_json(Path("report.json"), report)
    # DeepSpeed's threads abort about one regular exit in ten ("terminate called without an active exception")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

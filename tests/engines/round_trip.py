"""What test_round_trips.py runs on every rank: five steps, a snapshot, five steps, the snapshot back, the same five again.

    python -m tests.engines.round_trip REPORT.json CASE...        of CASE.json, a configuration

The report has the two sets of losses and what the snapshot held.
"""

from pathlib import Path

from dsframe.cluster import world as worlds
from dsframe.model.micro_batch import MicroBatch
from dsframe.run import settle_threads
from tests.files import read_json


def build(path):
    """The engine of a configuration, and what trains from one step to another and returns the losses."""
    settle_threads(worlds.here(), 1)
    import torch

    from tests.engines.several import prepare

    torch.set_num_threads(1)
    file = read_json(Path(path))
    make, loader = prepare(file, file["dsframe"]["engine"])
    engine = make()

    def steps(first, last):
        losses = []
        for step in range(first, last):
            result = engine.train_step(MicroBatch.of(loader.micro_batches(step)))
            losses.append(float(engine.sum_over_ranks(result.loss.reshape(1).double())) / engine.plan.world.size)
        return losses

    return engine, steps


def measure(case):
    engine, steps = build(f"{case}.json")
    import torch

    from tests.engines.snapshot import Snapshot

    fresh = Snapshot(engine.state())
    first = steps(0, 5)
    generator = torch.get_rng_state()
    kept = Snapshot(engine.state())
    after = steps(5, 10)
    torch.set_rng_state(generator)
    engine.load_state(kept)
    again = Snapshot(engine.state())
    repeated = steps(5, 10)
    torch.manual_seed(1 + engine.plan.data_rank)  # as build_model leaves it
    engine.load_state(fresh)
    from_the_start = steps(0, 5)
    weights = {name: kept.parameter(name) for name in kept.shapes}
    differences = [float((one.weight - again.parameter(name).weight).abs().max()) for name, one in weights.items()]
    engine.close()
    return {
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


if __name__ == "__main__":
    from tests.engines import several

    several.report(measure, [])

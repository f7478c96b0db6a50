"""What saves and loads the state of an engine in tests: the engine of a file, its steps, and what saves it."""

from pathlib import Path

from dsframe.cluster import world as worlds
from dsframe.model.micro_batch import MicroBatch
from dsframe.run import settle_threads
from tests.files import ds_config, read_json


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


def saver(engine, *, asynchronous=False):
    """What saves into the folder ``run``."""
    from dsframe.checkpoint.saver import Saver
    from dsframe.checkpoint.store import Retention, Store

    return Saver(
        engine,
        Store(Path("run")),
        {"training": {}, "run": {}},
        every_steps=None,
        at_end=True,
        retention=Retention(last=9),
        asynchronous=asynchronous,
        say=lambda line: None,
    )


def configuration(engine, changes, width):
    """Its file, for the task of odd_task.py."""
    return ds_config(
        8,
        {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        sections={
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}},
            **{key: value for key, value in changes.items() if key != "dsframe"},
        },
        **{
            "engine": engine,
            "task": {"name": "tests.engines.odd_task:Odd", "options": {"width": width}},
            "threads_per_rank": 1,
            **changes.get("dsframe", {}),
        },
    )

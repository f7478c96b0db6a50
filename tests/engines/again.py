"""What test_again.py runs on every rank: several trainings in one process, one after another.

torchrun --nproc-per-node=2 -m tests.engines.again ENGINE[:STAGE] ...
horovodrun -np 2 python -m tests.engines.again TIMES
"""

import atexit
import sys
import threading

import torch

from dsframe.cluster import process_group
from dsframe.cluster.world import here
from dsframe.config import load
from dsframe.run import execute
from dsframe.train import leave_at_once
from tests.files import ds_config

TASK = {"name": "language", "layers": 1, "heads": 2, "width": 32, "context": 16, "corpus": "synthetic", "samples": 64}


def train(number, engine, stage):
    """The last loss of four steps."""
    file = ds_config(
        8,
        "AdamW",
        0.001,
        sections={"zero_optimization": {"stage": int(stage or 0)}},
        engine=engine,
        task=TASK,
        steps=4,
        eval_micro_batch_size=200,
        threads_per_rank=1,
        run_dir=f"run-{number}",
    )
    return execute(load(file), quiet=True).loss


def start_again(times):
    """Horovod alone, quickly: ranks do not leave its rings in one order."""
    import horovod.torch as hvd

    from dsframe.engines.horovod import engine

    process_group.open_process_group(here(), torch.device("cpu"))
    for _ in range(times):
        engine._initialise(here())
        hvd.barrier()
        engine._leave()


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        start_again(int(sys.argv[1]))
        atexit._run_exitfuncs()  # as below
        leave_at_once(0)
    losses = []
    for number, wanted in enumerate(sys.argv[1:]):
        name, _, level = wanted.partition(":")
        losses.append(train(number, name, level))
    assert max(losses) - min(losses) < 1e-5, losses
    for server in (thread for thread in threading.enumerate() if "serve_forever" in thread.name):
        server.join(timeout=5)
        assert not server.is_alive(), "a training leaves Horovod's rendezvous server"
    if here().is_main:
        print(f"{len(losses)} trainings, one loss")
    atexit._run_exitfuncs()  # as dsframe.train does: Horovod over MPI leaves here
    leave_at_once(0)

"""Several engines, one after another, in the processes of one job: they share the process group of the first.

Only for measurements and tests that compare engines; a run has one engine, and closes it.
"""

import atexit
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from dsframe import engines, tasks
from dsframe.cluster import process_group, world
from dsframe.cluster.process_group import device_of
from dsframe.config import Facts, load
from dsframe.data import Loader
from dsframe.engines import precision
from dsframe.model import optimizers, schedules
from dsframe.model.plan import Plan
from dsframe.tasks.task import TaskContext
from dsframe.train import leave_at_once
from tests.files import write_json

_open = process_group.open_process_group


def report(measure, cases):
    """**Collective.** A whole program: ``-m MODULE REPORT.json CASE...`` writes what ``measure`` finds for each case (all)."""
    path, *chosen = sys.argv[1:]
    torch.set_num_threads(1)
    with one_process_group():
        found = {case: measure(case) for case in chosen or cases}
        if world.here().is_main:
            write_json(Path(path), found)
    atexit._run_exitfuncs()  # as dsframe.train does: Horovod over MPI leaves here
    leave_at_once(0)


@contextmanager
def one_process_group():
    """**Collective.** Inside it engines find a process group that is open already; it is closed at the end."""

    def once(*arguments):
        return dist.is_initialized() or _open(*arguments)

    with mock.patch.object(process_group, "open_process_group", once):
        yield
    process_group.close_process_group()


def prepare(file, name, here=None):
    """What makes the engine of this name on the file's own task (**collective**), and this rank's share of the task's data.

    ``here``: of an engine that is not of these ranks."""
    config, here = load(file), here or world.here()
    replicas = engines.TABLE[name].replicas
    config = config.resolve(Facts(here.size, total_steps=10, replicas=replicas))
    task = tasks.build(config.settings.task, config.settings.seed)
    optimizer = optimizers.of_task(optimizers.read(config), task)
    task.context = TaskContext(precision.parameter_dtype(config))
    batch, device = config.batch(here.size, replicas=replicas), device_of(here)
    loader = Loader(
        task.train_data(),
        seed=0,
        micro_batch_size=batch.micro_batch_size,
        accumulation_steps=batch.accumulation_steps,
        rank=batch.data_rank(here.rank),
        ranks=batch.data_parallel_size,
        device=device,
    )
    rates = schedules.planned(config, task, optimizer.learning_rate)
    plan = Plan(config, here, task, optimizer, rates, batch, device)
    return partial(engines.load(name, config, several=bool(task.models())), plan), loader

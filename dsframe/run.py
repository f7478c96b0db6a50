"""One run: chooses the engine and prepares this process, then calls :mod:`dsframe.job`.

``dsframe.fit`` calls it from Python, ``dsframe.train`` from a shell. It imports no torch, because the number of threads
must be set first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsframe import engines
from dsframe.cluster import world as worlds
from dsframe.cluster.world import World
from dsframe.config import Config, load
from dsframe.errors import ConfigError, WorldError
from dsframe.host import phases, processes
from dsframe.host.restored import at_end, restored
from dsframe.run_dir import loggers, output
from dsframe.run_dir.lock import RunLock
from dsframe.text import Say

if TYPE_CHECKING:
    from dsframe.job import Run
    from dsframe.results import Summary
    from dsframe.tasks.task import Task


def settle_threads(world: World, wanted: int | None) -> int:
    """Returns this rank's number of threads: ``wanted``, else OMP_NUM_THREADS, else its part of the usable cores.

    Sets OMP_NUM_THREADS, so it must run before torch is imported. ``deepspeed`` and ``horovodrun`` do not set it, and
    ranks that each use every core are three times slower (measured: Horovod, 2 ranks on 2 cores). Raises WorldError if
    OMP_NUM_THREADS is no number.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if given and not given.isdigit():
        raise WorldError(f"OMP_NUM_THREADS={given!r} is not a number of threads")
    threads = wanted or int(given or 0) or _cores(world)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def _cores(world: World) -> int:
    """Returns this rank's part of the node's cores, but at least what ``srun --cpus-per-task`` assigned to it."""
    here, given = len(os.sched_getaffinity(0)), os.environ.get("SLURM_CPUS_PER_TASK", "")
    assigned = min(here, int(given)) if world.launcher == "srun" and given.isdecimal() else 1
    return max(here // world.local_size, assigned)


def fit(
    task: Task,
    config: str | Path | dict[str, Any],
    *,
    overrides: Sequence[str] = (),
    resume: str = "never",
) -> Summary:
    """**Collective.** Trains ``task`` as ``config`` says: a path, the name of a file in ds_configs/, or the file as a
    dict.

    ``overrides``: ``dotted.key=value``. ``resume``: as for :func:`execute`. It trains in this process, which a launcher
    may have started with others. ``dsframe.load_model(summary.directory, task)`` returns the model of the last
    checkpoint. The environment, the random generators, torch's gradient mode and its threads are restored afterwards.
    Use it in programs that continue afterwards. In a script, end with ``dsframe.main(task)`` instead, which reads the
    command line and lets one rank report an error. Raises the subclasses of DsframeError.
    """
    with _signals_restored():
        return execute(load(config, overrides=overrides), task=task, resume=resume)


def execute(
    config: Config,
    *,
    task: Task | None = None,
    world: World | None = None,
    resume: str = "never",
    verbose: bool = False,
    quiet: bool = False,
    choice: tuple[str, tuple[str, ...]] | None = None,
) -> Summary:
    """**Collective.** Trains as ``config`` says and returns the results. Raises the subclasses of DsframeError.

    ``task``: replaces the file's. ``resume``: "never", "auto" (the run's newest complete checkpoint, if there is one),
    "best" (its best one) or a path to a checkpoint. ``verbose``: show libraries' output. ``quiet``: print nothing.
    """
    world = world or worlds.here()
    with prepared(config, task, world, resume=resume, verbose=verbose, quiet=quiet, choice=choice) as run:
        from dsframe import job
        from dsframe.training import data_trial

        say, seed = _sayer(world, quiet=quiet), config.settings.seed
        examined = cache(lambda: data_trial.examined(run.task, seed, run.data(), say))
        return job.train(replace(run, data=examined), world)


def _sayer(world: World, *, quiet: bool) -> Say:
    def say(line: str) -> None:
        if world.is_main and not quiet:
            with suppress(OSError):
                print(f"dsframe: {line}\n", end="", file=sys.stderr, flush=True)

    return say


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Restores the handlers of stop signals, which are ignored after a stop (``guard/signals.py``)."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers can only be set in the main thread
        return
    before = {number: signal.getsignal(number) for number in processes.STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python
                signal.signal(number, handler)


@contextmanager
def prepared(
    config: Config,
    task: Task | None,
    world: World,
    *,
    resume: str = "never",
    verbose: bool = False,
    quiet: bool = False,
    choice: tuple[str, tuple[str, ...]] | None = None,
) -> Iterator[Run]:
    """Prepares this process for ``config``: threads, cores, torch, the task. Arguments as for :func:`execute`.

    On exit the environment, generators and threads are restored (:mod:`dsframe.host.restored`).
    """
    began, home = time.perf_counter(), Path.cwd()
    phases.begin()
    with restored():
        engine, lines = choice or choose(config, world)
        threads = settle_threads(world, config.settings.threads_per_rank)
        output.silence(verbose=verbose, quiet=quiet)
        import torch  # reads OMP_NUM_THREADS

        from dsframe.host import numerics

        numerics.check_default_device()
        from dsframe import job, tasks
        from dsframe.checkpoint import pretrained
        from dsframe.guard import uncalled
        from dsframe.host import generators
        from dsframe.tasks import data_sets, preparation

        phases.done("imports")
        at_end(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)  # torch may have been imported before
        from_file = task is None
        task = task or tasks.build(config.settings.task, config.settings.seed)
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # by the caller: else its GPU has no generator yet
        device = torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")
        at_end(generators.restore, generators.capture(device), device)
        task.seed = config.settings.seed

        def read() -> tuple[Any, Any]:
            with data_sets.seeded(config.settings.seed):
                preparation.prepare(task, world, _sayer(world, quiet=quiet))
            return data_sets.given(task, "train_data"), data_sets.given(task, "eval_data")

        data = cache(read)
        called = tasks.build_hooks(config.settings.hooks, task.hooks)
        lines += tuple(line for user in (task, *called) for line in uncalled.lines(type(user)))
        settings = config.settings
        chosen = numerics.chosen(deterministic=settings.deterministic, tf32=settings.tf32)
        with RunLock() as lock, numerics.outside_of_the_callers(), chosen:
            options = job.RunOptions(resume, verbose=verbose, quiet=quiet)
            host = job.HostResources(threads, began, lock, home)
            phases.done("data")
            named = "" if from_file else _name(task)
            more = pretrained.beside_weights, loggers.Loggers
            yield job.Run(config, task, named, engine, data, called, lines, options, host, *more)


def choose(config: Config, world: World) -> tuple[str, tuple[str, ...]]:
    """Returns the engine's name and lines about the choice. Raises ConfigError if the engine cannot run the file."""
    choice = engines.choose(config, world.launcher)
    refused, notes = engines.examine(config, choice.name)
    if refused or (refused := loggers.missing(config)):
        raise ConfigError(refused)
    return choice.name, (*choice.announcements, *notes)


def _name(task: Task) -> str:
    return f"{type(task).__module__}:{type(task).__qualname__}"

"""One run: chooses the engine and prepares this process, then hands over to :mod:`dsframe.job`.

``dsframe.fit`` calls it from Python, ``dsframe.train`` from a shell. Imports no torch: the number of threads has to be settled
before.
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
    from dsframe.events import Listener
    from dsframe.job import Run
    from dsframe.results import Summary
    from dsframe.tasks.task import Task


def settle_threads(world: World, wanted: int | None) -> int:
    """Threads of this rank: ``wanted``, else OMP_NUM_THREADS, else this host's usable cores shared among its ranks.

    Sets OMP_NUM_THREADS, so it has to run before torch is imported. ``deepspeed`` and ``horovodrun`` set none, and ranks that
    each take every core are about three times slower (measured: Horovod, 2 ranks on 2 cores). Raises WorldError where
    OMP_NUM_THREADS is not a number.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if given and not given.isdigit():
        raise WorldError(f"OMP_NUM_THREADS={given!r} is not a number of threads")
    threads = wanted or int(given or 0) or _cores(world)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def _cores(world: World) -> int:
    """Cores for this rank's threads: its part of the host's, and no fewer than ``srun --cpus-per-task`` has given it alone."""
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
    """**Collective.** Trains ``task`` as ``config`` says: a path, the name of a file in ds_configs/, or the file as a dict.

    ``overrides``: ``dotted.key=value``. ``resume``: as for :func:`execute`. It trains in this process, which a launcher may have
    started beside others.
    ``dsframe.load_model(summary.directory, task)`` gives the model of the last checkpoint.
    Environment, random generators, gradient mode and threads of torch are afterwards as before.
    For programs that go on afterwards; a script's last line is better ``dsframe.main(task)``, which reads the command line
    and tells mistakes in one voice. Raises the subclasses of DsframeError.
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
    """**Collective.** Trains as ``config`` says and returns what it came to. Raises the subclasses of DsframeError.

    ``task``: the user's own, instead of the file's. ``resume``: "never", "auto" (the run's newest whole checkpoint, if there
    is one), "best" (its best one) or a path to a checkpoint. ``verbose``: let the libraries speak; ``quiet``: say nothing at all.
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
    """After a stop the signals that stop are ignored, for processes that leave (``guard/signals.py``). A program goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no handler was set, and none can be
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
    """This process, ready for what ``config`` says: threads, cores, torch, the task. Arguments as for :func:`execute`.

    The process is as before when it ends (:mod:`dsframe.host.restored`): environment, generators, threads.
    """
    began, home = time.perf_counter(), Path.cwd()
    phases.begin()
    with restored():
        engine, lines = choice or choose(config, world)
        threads = settle_threads(world, config.settings.threads_per_rank)
        output.silence(config.settings.profile, verbose=verbose, quiet=quiet)
        import torch  # reads OMP_NUM_THREADS

        from dsframe.host import numerics

        numerics.check_default_device()
        from dsframe import job, tasks
        from dsframe.checkpoint import pretrained
        from dsframe.guard import uncalled
        from dsframe.host import generators
        from dsframe.tasks import given, preparation

        phases.done("imports")
        at_end(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)  # for a program that had imported torch already
        ours = task is None
        task = task or tasks.build(config.settings.task, config.settings.seed)
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # by the caller: else its GPU has no generator yet
        device = torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")
        at_end(generators.restore, generators.capture(device), device)
        task.seed = config.settings.seed

        def read() -> tuple[Any, Any]:
            with given.seeded(config.settings.seed):
                preparation.prepare(task, world, _sayer(world, quiet=quiet))
            return given.given(task, "train_data"), given.given(task, "eval_data")

        data = cache(read)
        called = tasks.build_hooks(config.settings.hooks, task.hooks)
        lines += tuple(line for user in (task, *called) for line in uncalled.lines(type(user)))
        settings = config.settings
        chosen = numerics.chosen(deterministic=settings.deterministic, tf32=settings.tf32)
        with RunLock() as lock, numerics.outside_of_the_callers(), chosen:
            options = job.RunOptions(resume, verbose=verbose, quiet=quiet)
            host = job.HostResources(threads, began, lock, home)
            phases.done("data")
            named = "" if ours else _name(task)
            more = pretrained.beside_weights, loggers.Loggers, _traces
            yield job.Run(config, task, named, engine, data, called, lines, options, host, *more)


def _traces(*arguments: Any) -> Listener:
    from dsframe.training.traces import Traces

    return Traces(*arguments)


def choose(config: Config, world: World) -> tuple[str, tuple[str, ...]]:
    """The engine's name, and what is to be said of the choice. Raises ConfigError where it cannot do what the file asks for."""
    choice = engines.choose(config, world.launcher)
    refused, notes = engines.examine(config, choice.name)
    if refused or (refused := loggers.missing(config)):
        raise ConfigError(refused)
    return choice.name, (*choice.announcements, *notes)


def _name(task: Task) -> str:
    return f"{type(task).__module__}:{type(task).__qualname__}"

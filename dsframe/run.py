"""One run, put together: configuration, world, task, data and engine become a trainer.

This is the only place that knows all the parts. ``dsframe.fit`` calls it from Python, ``dsframe.train`` from a shell.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsframe import __version__, allocator, cores, engines, phases
from dsframe import world as worlds
from dsframe.config import Batch, Config, Facts, elastic, load, scaling
from dsframe.errors import CheckpointError, ConfigError, StoppedError, TrainingError, WorldError
from dsframe.report import loggers, outcome, output
from dsframe.report.claim import Claim
from dsframe.world import World

if TYPE_CHECKING:
    import torch

    from dsframe.checkpoint.commits import Commits
    from dsframe.data import EvaluationLoader, Loader
    from dsframe.tasks.task import Task
    from dsframe.trainer import Summary


def settle_threads(world: World, wanted: int | None, bound: tuple[int, ...] = ()) -> int:
    """Threads of this rank: ``wanted``, else OMP_NUM_THREADS, else this host's usable cores shared among its ranks.

    ``bound``: the cores that this rank has to itself, if it was bound to some.

    Sets OMP_NUM_THREADS, so it has to run before torch is imported. ``deepspeed`` and ``horovodrun`` set none, and ranks that
    each take every core are about three times slower (measured: Horovod, 2 ranks on 2 cores). Raises WorldError where
    OMP_NUM_THREADS is not a number.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if given and not given.isdigit():
        raise WorldError(f"OMP_NUM_THREADS={given!r} is not a number of threads")
    threads = wanted or int(given or 0) or len(bound) or cores.available(world)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def fit(
    task: Task, config: str | Path | dict[str, Any], *, overrides: Sequence[str] = (), resume: str = "never"
) -> Summary:
    """**Collective.** Trains ``task`` as ``config`` says: a path, the name of a file in ds_configs/, or the file as a dict.

    ``overrides``: ``dotted.key=value``. ``resume``: as for :func:`execute`.
    For programs that go on afterwards; a script's last line is better ``dsframe.main(task)``, which reads the command line
    and tells mistakes in one voice. Raises the subclasses of DsframeError.
    """
    return execute(load(config, overrides=overrides), task=task, resume=resume)


def execute(
    config: Config,
    *,
    task: Task | None = None,
    world: World | None = None,
    resume: str = "never",
    verbose: bool = False,
    quiet: bool = False,
) -> Summary:
    """**Collective.** Trains as ``config`` says and returns what it came to. Raises the subclasses of DsframeError.

    ``task``: the user's own, instead of the file's. ``resume``: "never", "auto" (the run's newest whole checkpoint, if there
    is one) or a path to a checkpoint. ``verbose``: let the libraries speak; ``quiet``: say nothing at all.
    """
    began = time.perf_counter()
    phases.begin()
    world = world or worlds.here()
    choice = engines.choose(config, world.launcher)
    refused, notes = engines.examine(config, choice.name)
    if world.elastic:
        engines.refuse_fixed(choice.name)
        refused += elastic.problems(config, world.size)  # launch has done so for --min-np, which nobody tells workers
        notes += elastic.cautions(config, world.size)
    if refused or (refused := loggers.missing(config)):
        raise ConfigError(refused)
    bound = cores.bind(world) if config.settings.bind_cores else ()
    threads = settle_threads(world, config.settings.threads_per_rank, bound)

    output.hush(config.settings.profile, verbose=verbose, quiet=quiet)
    import torch

    from dsframe import tasks

    phases.done("imports")
    torch.set_num_threads(threads)  # for a program that had imported torch already
    task = task or tasks.build(config.settings.task, config.settings.seed)
    task.seed = config.settings.seed
    data = cache(lambda: (task.train_data(), task.eval_data()))
    said = (*choice.announcements, *notes)
    with Claim() as claim:
        run = _Run(config, task, choice.name, data, resume, verbose, quiet, threads, bound, said, began, claim)
        phases.done("data")
        if not world.elastic:
            return _train(run, world, None)
        data()  # not while others wait for this process
        summary: Summary = engines.elastic(choice.name)(partial(_train, run), config)
        return summary


@dataclass(frozen=True)
class _Run:
    """What does not depend on how many processes there are: it stays while they come and go."""

    config: Config
    task: Task
    engine: str
    data: Callable[[], tuple[Any, Any]]
    """For training and for evaluation; read once."""
    resume: str
    verbose: bool
    quiet: bool
    threads: int
    bound: tuple[int, ...]
    said: tuple[str, ...]
    began: float
    claim: Claim


def _train(run: _Run, world: World, commits: Commits | None) -> Summary:
    """**Collective.** Puts together what does, and trains: from the last commit where there is one, else as ``resume`` says."""
    from dsframe import optimizers, schedules, weighting
    from dsframe.checkpoint.commits import begin_again
    from dsframe.checkpoint.resume import about, begin, refuse
    from dsframe.checkpoint.saver import Saver
    from dsframe.checkpoint.share import agree
    from dsframe.checkpoint.store import Retention, Store
    from dsframe.engine import Plan
    from dsframe.plan.after import predicted, utilization
    from dsframe.process_group import device_of
    from dsframe.report import page
    from dsframe.report.memory import resident_bytes
    from dsframe.report.observe import Observer
    from dsframe.report.progress import Progress
    from dsframe.report.record import Record, beside, finished
    from dsframe.report.watchdog import Watchdog
    from dsframe.trainer import Cadence, Trainer

    phases.done("imports")
    config, task, entry, settings = run.config, run.task, engines.TABLE[run.engine], run.config.settings
    last = commits.last if commits else None
    if commits:
        worlds.move(world)
        outcome.reporter().rank = world.rank
    batch = elastic.batch(config, world.size) if commits else config.batch(world.size, replicas=entry.replicas)
    readers, device = batch.data_parallel_size if commits else world.size, device_of(world)
    if device.type == "cpu":
        allocator.keep_freed()
    loader, evaluation = _loaders(run, batch, world, device)
    refuse(config, run.resume, evaluates=evaluation is not None)
    cadence = Cadence.of(settings, loader.sampler, evaluates=evaluation is not None)
    config = config.resolve(Facts(readers, cadence.total_steps, task.hidden_size, entry.replicas))
    optimizer = optimizers.read(config)
    schedule = schedules.planned(config, optimizer.learning_rate, batch.train_batch_size)
    directory = directory_of(config, run.engine, type(task).__name__)
    plan = Plan(config, world, task, optimizer, schedule, batch, device, run.verbose, directory)
    progress = Progress(
        cadence.total_steps,
        speaks=world.is_main and not run.quiet,
        unit=task.unit,
        units_per_step=batch.train_batch_size * task.units_per_sample,
    )

    def say(line: str) -> None:
        progress.say(f"dsframe: {line}")

    lines = (*run.said, *_said(config, batch, run.bound, device)) if last is None else ()
    for line in (*lines, *(elastic.said(batch, world.size) if commits else ())):
        say(line)
    weighting.refuse(task, batch)
    run.claim.take(directory, world, say, takes_over=last is not None)
    phases.done("data")
    make = engines.load(run.engine, config)
    phases.done("engine's imports")
    base_bytes = resident_bytes(device)
    watchdog = Watchdog(world, settings.hang_timeout_seconds)
    with watchdog:
        engine = make(plan)
        phases.done("engine")
        watchdog.connect(engine)
        agree(engine, _facts(config, loader, evaluation))
    output.begin_anew()  # rank 0 has come here too, so the directory is this run's
    for what in engine.depends if last is None else ():
        say(f"this model's {what}")
    progress.say(
        f"dsframe: {engine.description}; {world.size} x {device.type} under {world.launcher}, {run.threads} thread(s) each; "
        f"batch {batch.train_batch_size} = {batch.micro_batch_size} x {batch.accumulation_steps} x {batch.data_parallel_size}; "
        f"{cadence.total_steps:,} steps; {directory}"
    )
    ready_seconds = time.perf_counter() - run.began
    share = utilization(engine, progress.say) if settings.mfu else None
    checkpoints, wanted = Store(directory / "checkpoints"), settings.checkpoints
    mine = about(
        config,
        task,
        optimizer,
        batch,
        samples=loader.sampler.samples,
        world_size=world.size,
        engine=run.engine,
        package=entry.package,
    )
    with watchdog:
        if last:
            start = begin_again(engine, last, checkpoints, say)
        else:
            start = begin(engine, run.resume, checkpoints, mine, cadence.total_steps, say, watchdog.alive)
    done = start.step if start.in_place else 0
    complete = done == cadence.total_steps and finished(directory, done)
    record = None
    if world.is_main and not complete:
        record = Record(plan, run.engine, engine.description, ready_seconds, done, share, say=say)
    observer = Observer(plan, directory, start.step, cadence.total_steps, progress.say)
    saver = Saver(
        engine,
        checkpoints,
        mine,
        every_steps=wanted.every_steps,
        at_end=wanted.at_end,
        asynchronous=wanted.asynchronous,
        retention=Retention(wanted.keep_last, wanted.keep_best, wanted.keep_every),
        say=progress.say,
    )
    phases.done("records")
    try:
        with watchdog:
            saver.sign_of_life = watchdog.alive
            trainer = Trainer(
                engine, loader, evaluation, cadence, progress, record, saver, watchdog, observer, share, commits
            )
            summary = trainer.fit(start)
            sent = trainer.communication() if settings.measure_communication else None
    except Exception as error:
        together = isinstance(error, (StoppedError, TrainingError, CheckpointError))  # all ranks raise these
        if together or commits:  # else this process ends
            saver.close(hopeless=not together)
            progress.close()
            if record:
                record.close("KILLED" if isinstance(error, StoppedError) else "FAILED")
        if together:
            engine.close()
        raise
    progress.close()
    engine.close()
    if record:
        forecast = predicted(config, run.engine, task, readers, device, base_bytes)
        record.finish(summary, forecast, sent)
        with record.surviving():
            page.write([directory], directory / "report.html")
        say(str(summary))
        say(beside(summary, forecast))
    elif complete:
        say(
            f"{directory} is complete: all {done:,} steps are done, and its record stays; raise steps or epochs to train on"
        )
    return summary


def directory_of(config: Config, engine: str, task: str) -> Path:
    """Where the run's results are: as the file says, else named after the file, or after the ``task`` where there is none."""
    return Path(config.settings.run_dir or f"runs/{config.path.stem if config.path else task}-{engine}")


def _loaders(run: _Run, batch: Batch, world: World, device: torch.device) -> tuple[Loader, EvaluationLoader | None]:
    """This rank's shares of the training and the held-out data."""
    from dsframe.data import EvaluationLoader, Loader

    config, task = run.config, run.task
    seed, rank, ranks = config.settings.seed, batch.data_rank(world.rank), batch.data_parallel_size
    loader = Loader(
        run.data()[0],
        seed=seed,
        micro_batch_size=batch.micro_batch_size,
        accumulation_steps=batch.accumulation_steps,
        rank=rank,
        ranks=ranks,
        drop_last=config.deepspeed.dataloader_drop_last,
        device=device,
        workers=task.workers,
    )
    held_out = run.data()[1]
    if held_out is None:
        return loader, None
    size = config.settings.eval_micro_batch_size or batch.micro_batch_size
    return loader, EvaluationLoader(
        held_out, seed=seed, micro_batch_size=size, rank=rank, ranks=ranks, device=device, workers=task.workers
    )


def _facts(config: Config, loader: Loader, evaluation: EvaluationLoader | None) -> dict[str, str]:
    """What has to be the same on every rank, or they would train different things."""
    import torch

    return {
        "configuration": config.digest[:16],
        "training samples": str(loader.sampler.samples),
        "evaluation samples": str(len(evaluation.source)) if evaluation else "none",
        "dsframe": __version__,
        "torch": torch.__version__,
    }


def _said(config: Config, batch: Batch, bound: tuple[int, ...], device: torch.device) -> list[str]:
    """What the user should know of the machine, and what this run does to rates and cores because the file asks for it."""
    from dsframe.engines import precision

    scaled = scaling.sentence(config.settings.large_batch, batch.train_batch_size)
    slow = precision.emulated(config, device)
    return [line for line in (slow, scaled, cores.sentence(bound)) if line]

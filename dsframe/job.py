"""A run in five phases: data, engine, resume, train, finish. The only module that knows all the parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from dsframe import engines
from dsframe.checkpoint.changes import about
from dsframe.checkpoint.resume import Start, begin, refuse
from dsframe.checkpoint.saver import ModelFiles, Saver
from dsframe.checkpoint.store import Retention, Store
from dsframe.cluster.agreement import assert_engines_agree, assert_ranks_agree
from dsframe.cluster.process_group import device_of, extend_limits
from dsframe.cluster.world import World
from dsframe.config.resolve import epochs, inherit
from dsframe.config.resolve.facts import Facts
from dsframe.config.value import Config
from dsframe.data.fingerprint import assert_same_samples
from dsframe.engine import Engine
from dsframe.engines import precision
from dsframe.errors import CheckpointError, ConfigError, DataError, StoppedError, TaskError, TrainingError
from dsframe.events import RunSchedule
from dsframe.guard.watchdog import Watchdog
from dsframe.hooks import Hooks
from dsframe.host import generators, phases
from dsframe.host.memory import keep_freed, reset_peak, resident_bytes
from dsframe.model import optimizers, schedules
from dsframe.model.followers import EarlyStop
from dsframe.model.plan import Plan
from dsframe.results import Summary
from dsframe.run_dir import blocks, output
from dsframe.run_dir.lock import RunLock
from dsframe.run_dir.progress import Progress
from dsframe.run_dir.record import MakeLoggers, Record, finished, read_metrics
from dsframe.tasks.several import model_names
from dsframe.tasks.task import Task, TaskContext
from dsframe.text import Json, keys
from dsframe.trainer import Outputs, Trainer, Work
from dsframe.training import weighting
from dsframe.training.loaders import loaders
from dsframe.version import __version__


@dataclass(frozen=True)
class RunOptions:
    """Command-line options that are not keys of the file."""

    resume: str
    verbose: bool
    quiet: bool


@dataclass(frozen=True)
class HostResources:
    """Resources of this process, and its lock on the run's directory."""

    threads: int
    began: float
    """Start of the run, by ``time.perf_counter``."""
    lock: RunLock
    home: Path
    """The working directory at the start. Stored because a task may change it."""


@dataclass(frozen=True)
class Run:
    """Everything that does not depend on the number of processes."""

    config: Config
    task: Task
    script_task: str
    """Name of the task if a script passed it (no other program can rebuild it), else empty."""
    engine: str
    data: Callable[[], tuple[Any, Any]]
    """Returns the training and the evaluation data; reads them once."""
    hooks: tuple[Hooks, ...]
    """Hooks of the file, then those of the task."""
    lines: tuple[str, ...]
    """Lines printed at the start."""
    options: RunOptions
    host: HostResources
    model_files: ModelFiles
    """Writes the files next to a checkpoint's weights that other programs read."""
    loggers: MakeLoggers


@dataclass(frozen=True)
class Job:
    """Everything that is known before the engine is built."""

    run: Run
    plan: Plan
    work: Work
    progress: Progress

    def say(self, line: str) -> None:
        self.progress.say(f"dsframe: {line}")


def train(run: Run, world: World) -> Summary:
    """**Collective.** Trains as the file and the command line ask."""
    phases.done("imports")
    job = prepare(run, world)
    for line in filter(None, (*run.lines, *job.work.loader.lines(job.work.schedule.total_steps))):
        job.say(line)
    weighting.refuse(run.task, job.plan.batch)
    run.host.lock.take(job.plan.directory, world, job.say)
    phases.done("data")
    watchdog = Watchdog(world, run.config.settings.hang_timeout_seconds)
    read = _given_early(run.task)
    engine, facts = make_engine(job, watchdog)
    _refuse_late(run, read)
    mine = _manifest(job, engine, watchdog)
    facts |= _identity(job, engine, mine)
    saver, start = _resume(job, engine, watchdog, mine)
    done = start.step if start.in_place else 0
    over = done == job.work.schedule.total_steps or (job.plan.stop is not None and job.plan.stop.reached != "")
    complete = over and finished(job.plan.directory, done)
    keeps = world.is_main and not complete
    record = Record(job.plan, facts, done, loggers=run.loggers, say=job.say) if keeps else None
    phases.done("records")
    outputs = Outputs(job.progress, record, saver, run.hooks)
    reset_peak(job.plan.device)
    with _ending(job, engine, outputs), watchdog:
        summary = Trainer(engine, job.work, outputs, watchdog).fit(start)
    _finish(job, engine, record, summary)
    if complete and world.is_main:
        job.say(
            f"{job.plan.directory} is complete: {summary.stopped or f'all {done:,} steps are done'}, and its record stays; "
            f"raise {'dsframe.stop.patience' if summary.stopped else 'steps or epochs'} to train on"
        )
    return summary


def prepare(run: Run, world: World) -> Job:
    """Splits the data, and computes all that follows from the file and the number of processes."""
    config, task, entry, settings = run.config, run.task, engines.TABLE[run.engine], run.config.settings
    _refuse_several(run)
    batch = config.batch(world.size, replicas=entry.replicas)
    device = device_of(world)
    task.context = TaskContext(precision.parameter_dtype(config), world.rank, world.size, run.options.quiet)
    if device.type == "cpu":
        keep_freed()
    if config.deepspeed.optimizer is None:
        optimizers.read(config)  # raises now, not after hours of data preparation
    loader, evaluation = loaders(config, task, run.data(), batch, world, device)
    refuse(config, run.options.resume, evaluates=bool(evaluation))
    schedule = RunSchedule.of(settings, loader.sampler, evaluates=bool(evaluation))
    epoch_steps = loader.sampler.epoch_steps
    config = config.resolve(Facts(world.size, schedule.total_steps, epoch_steps, entry.replicas))
    optimizer = optimizers.of_task(optimizers.read(config), task)
    optimizers.try_out(optimizer, device)
    rates = schedules.planned(config, task, optimizer.learning_rate)
    named = output.directory_of(config, run.engine, type(task).__name__)
    _refuse_followers(config, evaluates=bool(evaluation))
    progress = Progress(
        schedule.total_steps,
        speaks=world.is_main and not run.options.quiet,
        unit=task.unit,
        units_per_step=batch.train_batch_size * task.units_per_sample,
        home=None if named.is_absolute() else run.host.home,
    )
    directory = run.host.home / named
    early = EarlyStop(settings.stop) if settings.stop else None
    plan = Plan(config, world, task, optimizer, rates, batch, device, run.options.verbose, directory, early)
    return Job(run, plan, Work(loader, evaluation, schedule), progress)


def _refuse_followers(config: Config, *, evaluates: bool) -> None:
    """Raises TaskError if a feature needs evaluations and the task has no eval_data."""
    section = config.deepspeed.scheduler
    for what, asked in (
        ("ReduceLROnPlateau", section and section.type == "ReduceLROnPlateau"),
        ("dsframe.stop", config.settings.stop),
    ):
        if asked and not evaluates:
            raise TaskError(f"{what} waits for evaluations, but the task has no eval_data")


def _refuse_several(run: Run) -> None:
    """Raises TaskError or ConfigError if the task has several models and a feature does not support that."""
    if model_names(run.task):
        if refused := engines.problems_with_several_models(run.config, run.engine):
            raise ConfigError(refused)
    elif run.config.settings.optimizers:
        raise TaskError(
            f"dsframe.optimizers: {type(run.task).__name__} has no models(), so there are none to name; remove it"
        )


def _given_early(task: Task) -> Mapping[str, Any]:
    """Returns those attributes of the task that are read before its model is built."""
    return {name: vars(task).get(name) for name in ("collate", "eval_collate", "workers")}


def _refuse_late(run: Run, read: Mapping[str, Any]) -> None:
    """Raises TaskError if ``model()`` has set an attribute that was already ``read``."""
    late = [name for name, value in _given_early(run.task).items() if value is not read[name]]
    late += ["hooks"] * (len(run.hooks) != len(run.config.settings.hooks) + len(run.task.hooks))
    if late:
        whose, names = type(run.task).__name__, ", ".join(late)
        raise TaskError(f"{whose}.model sets {names}, which was read before; set it in __init__")


def make_engine(job: Job, watchdog: Watchdog, *, trains: bool = True) -> tuple[Engine, Json]:
    """**Collective.** Returns the engine, and its facts for the run's record. ``trains``: False if it only evaluates."""
    run, plan = job.run, job.plan
    facts = _facts(job)
    agreed = assert_ranks_agree(plan.world, facts)
    make = engines.load(run.engine, plan.config, several=bool(plan.task.models()))
    phases.done("engine's imports")
    base_bytes = resident_bytes(plan.device)
    with watchdog:
        engine = make(plan)
        phases.done("engine")
        extend_limits(plan.collective_limit)
        watchdog.look_at(engine.built.calls)
        if not agreed:
            assert_engines_agree(engine, facts)
    job.progress.block(
        f"dsframe {__version__}",
        blocks.header(
            plan,
            engine,
            samples=job.work.loader.sampler.samples,
            held_out=sum(len(loader.source) for loader in job.work.evaluation.values()),
            steps=job.work.schedule.total_steps if trains else None,
            threads=run.host.threads,
        ),
    )
    if trains:
        _describe(job, engine)
    return engine, {
        "engine": run.engine,
        "description": engine.description,
        "start_seconds": time.perf_counter() - run.host.began,
        "script_task": run.script_task or None,
        "base_bytes": base_bytes,
    }


def _describe(job: Job, engine: Engine) -> None:
    """Prints effects that neither the file nor the model shows, and the members of the parameter groups."""
    config = job.plan.config
    if inherited := inherit.sentence(config.inherited):
        job.say(inherited)
    if became := epochs.sentence(config.resolved, config.facts.epoch_steps):
        job.say(became)
    for line in schedules.notes(config, job.plan.schedule, job.work.schedule.total_steps):
        job.say(line)
    if engine.built.origin:
        job.say(engine.built.origin)
    if engine.built.adapter is not None:
        job.say(engine.built.adapter.line)
    for text in dict.fromkeys(dependence.text for dependence in engine.built.depends):  # models may share them
        job.say(f"this model's {text}")
    for line in engine.built.groups.lines:
        job.say(f"parameter group: {line}")


def _manifest(job: Job, engine: Engine, watchdog: Watchdog) -> Json:
    """**Collective.** Returns this run's part of a manifest. Raises DataError if the ranks have different samples."""
    run, plan = job.run, job.plan
    mine = about(
        plan.config,
        run.task,
        plan.optimizer,
        plan.batch,
        samples=job.work.loader.sampler.samples,
        world_size=plan.world.size,
        engine=run.engine,
        package=engines.TABLE[run.engine].package,
    )
    if engine.built.adapter is not None:
        mine["training"].update(engine.built.adapter.training)
        mine["adapter"] = engine.built.adapter.peft
    mine["course"].update({"parameter_groups": [], "no_decay": None, "layer_decay": None, **engine.built.groups.asked})
    for section, values in engine.built.manifest.items():
        mine[section].update(values)
    with watchdog, generators.kept(plan.device):  # reading samples may draw random numbers
        mine["data"] = assert_same_samples(engine, job.work.loader)
        mine["evaluation data"] = {}
        for name, held_out in job.work.evaluation.items():
            read = {f"sample {index}": digest for index, digest in assert_same_samples(engine, held_out).items()}
            mine["evaluation data"][name] = {"the number of samples": held_out.samples, **read}
    return mine


def _identity(job: Job, engine: Engine, mine: Json) -> Json:
    """Returns the facts by which ``dsframe compare`` recognizes the same model and the same data."""
    parts = engine.built.parts
    trained, parameters = sum(part.trained for part in parts), sum(part.parameters for part in parts)
    model = {"task": mine["training"]["task"], "parameters": parameters, "trained": trained}
    return {
        "model": model | {f"code of {module}": digest for module, digest in mine["source"].items()},
        "data": {"samples": job.work.loader.sampler.samples}
        | {f"sample {index}": digest for index, digest in mine["data"].items()},
    }


def _resume(job: Job, engine: Engine, watchdog: Watchdog, mine: Json) -> tuple[Saver, Start]:
    """**Collective.** Returns the saver, and where training starts. ``mine``: result of :func:`_manifest`."""
    run, plan, wanted = job.run, job.plan, job.plan.config.settings.checkpoints
    epoch_steps = job.work.loader.sampler.epoch_steps
    every, keep_every = (
        epochs.steps(often, epoch_steps) if often else None for often in (wanted.every_steps, wanted.keep_every)
    )
    checkpoints = Store(plan.directory / "checkpoints")
    saver = Saver(
        engine,
        checkpoints,
        mine,
        every_steps=every,
        at_end=wanted.at_end,
        asynchronous=wanted.asynchronous,
        model_files=run.model_files,
        retention=Retention(wanted.keep_last, wanted.keep_best, keep_every),
        say=job.progress.say,
    )
    saver.sign_of_life = watchdog.alive
    saver.claim = lambda: run.host.lock.renew(job.progress.say)
    with watchdog:
        total = job.work.schedule.total_steps
        start = begin(engine, run.options.resume, checkpoints, mine, total, job.say, watchdog.alive)
    for follower in plan.followers.values() if start.step in job.work.schedule.regular else ():
        if follower.metric in start.evaluation and follower.observed != start.step:
            follower.observe(start.step, start.evaluation)  # evaluated after the checkpoint was written
    if start.in_place:
        saver.saved_step = start.step  # its evaluation may still be added
    return saver, start


@contextmanager
def _ending(job: Job, engine: Engine, outputs: Outputs) -> Iterator[None]:
    """Encloses the training: if it raises, closes everything that is open."""
    try:
        yield
    except Exception as error:
        together = isinstance(error, (StoppedError, TrainingError, CheckpointError))  # all ranks raise these
        if together:
            outputs.saver.close()
        else:  # only this process ends
            outputs.saver.wait_briefly()
        job.progress.close()
        if outputs.record:
            outputs.record.close(finished=False)
        if together:
            engine.close()
        raise


def _finish(job: Job, engine: Engine, record: Record | None, summary: Summary) -> None:
    """Closes the run's record and prints the results."""
    job.progress.close()
    engine.close()
    if record:
        record.finish(summary)
        settings = job.plan.config.settings
        wanted = settings.checkpoints.keep_best or (settings.stop.metric if settings.stop else None)
        best = None
        with suppress(DataError):  # the record is incomplete if the disk was full
            best = blocks.best_of(read_metrics(job.plan.directory), wanted)
        job.progress.block("dsframe: done", blocks.ending(summary, job.plan.directory, best))


def _facts(job: Job) -> dict[str, str]:
    """Returns the values that must be equal on all ranks; otherwise the ranks would train different things."""
    run, work = job.run, job.work
    return {
        "engine": run.engine,
        "--resume": run.options.resume,
        **keys(job.plan.config.shown()),
        "training samples": str(work.loader.sampler.samples),
        "order of samples": xxh3_64_hexdigest(work.loader.sampler.first().numpy().data),
        "evaluation samples": ", ".join(f"{name} {len(loader.source)}" for name, loader in work.evaluation.items()),
        "dsframe": __version__,
        "torch": torch.__version__,
    }

"""``dsframe launch``: checks a file, chooses the launcher that belongs to it, and runs the job to its end."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from dsframe import engines
from dsframe.cluster import world as worlds
from dsframe.cluster.rendezvous import free_port, interface_to
from dsframe.config import Config, load
from dsframe.config.resolve import elastic
from dsframe.errors import ConfigError, DsframeError, WorldError
from dsframe.host import streams, supervise
from dsframe.run_dir.output import directory_of
from dsframe.tools import check
from dsframe.tools.commands import command
from dsframe.tools.launch import devices, launchers
from dsframe.tools.launch import hosts as places
from dsframe.tools.launch.attempts import Attempts, say
from dsframe.tools.launch.launchers import Elastic, Job, Launch
from dsframe.train import parse as parse_training

EPILOG = """\
All other options go to dsframe.train, before or after "--":
  dsframe launch --config zero3.json -np 4 --set dsframe.steps=100 --run-dir runs/short

Hosts: -H, a host file ("host slots=4" or "host:4" a line), or those of the Slurm allocation that this runs in.
Without -np: one process for each slot; without hosts: one for each GPU of this machine.

exit codes: those of a training process (`dsframe explain` lists them), or 1 if the launcher gave no better one.
With --restarts a failed run goes on from its newest checkpoint; the same failure at the same step ends it.
"""


@dataclass(frozen=True)
class Wanted:
    """The request of the command line."""

    config: Config
    engine: str
    launcher: str
    job: Job
    chosen: argparse.Namespace
    """The options of dsframe.train."""
    directory: Path


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Train on this machine or many, with the launcher that belongs to the file."
    result = command("launch", about, EPILOG, allow_abbrev=False)
    add = result.add_argument
    add("-np", "--processes", type=int, metavar="N", help="number of processes in all")
    where = result.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:N,...", help="hosts, and the number of processes on each")
    where.add_argument("--hostfile", metavar="FILE", type=Path, help="the same, from a file")
    add(
        "--launcher",
        choices=("auto", *launchers.NAMES),
        default="auto",
        help="default: the engine's own; srun in Slurm",
    )
    add("--min-np", type=int, metavar="N", help="horovodrun: continue with as few processes if some are lost")
    add("--max-np", type=int, metavar="N", help="horovodrun: use up to so many processes as hosts are added")
    where.add_argument(
        "--host-discovery-script", metavar="SCRIPT", help="horovodrun: a program that prints the current hosts"
    )
    add("--interface", metavar="NAME", help="network interface to the other hosts (default: the one that leads there)")
    add("--script", metavar="FILE", help="your program that ends in dsframe.main(task), instead of dsframe.train")
    add(
        "--print",
        nargs="?",
        choices=("one", "all"),
        const="one",
        dest="show",
        help="print the command instead of running it; all: for every launcher",
    )
    add("--restarts", type=int, default=0, metavar="N", help="restart up to N times if the run fails")
    add(
        "--restart-wait",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="wait before the first restart; doubled after each that saves nothing new, at most 60 (default: %(default)s)",
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job that the command line describes and returns its exit code. Raises the subclasses of DsframeError."""
    options, rest = parser().parse_known_args(argv)
    if options.processes is not None and options.processes < 1:
        parser().error("-np must be at least 1")
    if options.restarts < 0:
        parser().error("--restarts must be at least 0")
    training = [word for word in rest if word != "--"]
    wanted = read(options, training)
    if options.show == "all":
        for name in launchers.NAMES:
            try:
                text = launchers.plan(name, wanted.job).show(wanted.job.hosts)
            except WorldError as error:
                text = f"(not for this job: {error})"
            print(f"# {name}\n{text}")
        return 0
    if options.show:
        print(launchers.plan(wanted.launcher, wanted.job).show(wanted.job.hosts))
        return 0
    streams.survive()
    code = _check(wanted, wanted.chosen.set, quiet=wanted.chosen.quiet)
    return code or _by_hand(wanted) or _run(wanted, options)


def read(options: argparse.Namespace, training: Sequence[str]) -> Wanted:
    """Parses the command line. Raises ConfigError and WorldError."""
    outside = worlds.read(os.environ)
    if outside.launcher not in ("python", "srun"):
        raise WorldError(
            f"this shell has the variables of {outside.launcher} (rank {outside.rank} of {outside.size}): dsframe launch starts "
            "a launcher and cannot run under one; unset them"
        )
    chosen = parse_training(training)
    config = load(chosen.config, overrides=chosen.set)
    if changing := _elastic(options):
        options.launcher = "horovodrun" if options.launcher == "auto" else options.launcher
    guess = options.launcher if options.launcher in ("horovodrun", "torchrun", "mpirun", "srun") else "deepspeed"
    engine = engines.choose(config, guess).name
    job = replace(_job(options, config, training), elastic=changing)
    if changing:
        engines.refuse_fixed(engine)
        if wrong := elastic.problems(config, changing.least):
            raise ConfigError(wrong)
    launcher = launchers.natural(engine, job) if options.launcher == "auto" else options.launcher
    directory = directory_of(config, engine, _task_name(options))
    return Wanted(config, engine, launcher, job, chosen, directory)


def _by_hand(wanted: Wanted) -> int:
    """Prints a command for each host where the launcher has one for each, and returns an exit code; 0 where it has not."""
    launch = launchers.plan(wanted.launcher, wanted.job)
    if len(launch.commands) == 1:
        return 0
    print(launch.show(wanted.job.hosts))
    say(
        f"{wanted.launcher} starts the processes of one host: type each line on its host, or install pdsh (for deepspeed, "
        "with --hostfile) or Open MPI"
    )
    return ConfigError.exit_code


def _task_name(options: argparse.Namespace) -> str:
    return Path(options.script).stem if options.script else "Task"


def _elastic(options: argparse.Namespace) -> Elastic | None:
    least, most, script = options.min_np, options.max_np, options.host_discovery_script
    if least is None and most is None and script is None:
        return None
    if options.processes is None:
        raise WorldError("write how many processes to start with: -np N")
    if script is None and not options.hosts and not options.hostfile:
        raise WorldError("--min-np and --max-np need --host-discovery-script, or -H")
    if least is not None and least < 1:
        raise WorldError(f"--min-np {least}: must be at least 1")
    given = [
        (name, n) for name, n in (("--min-np", least), ("-np", options.processes), ("--max-np", most)) if n is not None
    ]
    if any(one > other for (_, one), (_, other) in pairwise(given)):
        raise WorldError(f"{', '.join(f'{name} {n}' for name, n in given)}: they must not decrease")
    least = options.processes if least is None else least
    if script is not None and not os.access(script, os.X_OK):
        raise WorldError(f"{script} cannot be run; chmod +x {script}")
    return Elastic(least, most, None if script is None else str(Path(script).absolute()))


def _job(options: argparse.Namespace, config: Config, training: Sequence[str]) -> Job:
    slurm = places.from_slurm(os.environ)
    hosts: tuple[places.Host, ...] = ()
    if options.hosts:
        hosts = places.parse(options.hosts)
    elif options.hostfile:
        hosts = places.read_file(options.hostfile)
    allocation = not hosts and bool(slurm)
    hosts = hosts or slurm
    processes = options.processes
    if hosts:
        hosts = places.share(hosts, options.max_np or processes)
        processes = (options.max_np and processes) or sum(host.slots for host in hosts)
    gpus = devices.visible(os.environ)
    processes = processes or len(gpus)
    if not processes:
        raise WorldError("this machine has no GPU; write how many processes to start: -np N")
    address = hosts[0].name if hosts else "127.0.0.1"
    if len(hosts) == 1 and hosts[0].is_here and not allocation:
        hosts, address = (), "127.0.0.1"
    here = not hosts and options.host_discovery_script is None
    mask = os.environ.get("CUDA_VISIBLE_DEVICES") if gpus and here else None
    if mask is not None and processes > len(gpus):
        raise WorldError(
            f"-np {processes}, but CUDA_VISIBLE_DEVICES={mask} shows {len(gpus)}: start no more, name more GPUs there, or "
            "hide all of them (CUDA_VISIBLE_DEVICES= ... --launcher torchrun) to train on the CPU"
        )
    local = max((host.slots for host in hosts), default=processes)
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    return Job(
        processes=processes,
        program=(options.script,) if options.script else ("-m", "dsframe.train"),
        arguments=tuple(training),
        hosts=hosts,
        hostfile=options.hostfile,
        gpus=() if mask is None else gpus[:processes],
        threads=config.settings.threads_per_rank or (int(given) if given.isdigit() else max(1, cores // local)),
        address=address,
        port=free_port(),
        interface=options.interface or _interface(hosts),
        allocation=allocation,
    )


_ASKED_FOR_ROUTE = 8
"""Hosts whose routes may say which interface leads to the others: of thousands that nobody knows it is no use to ask all."""


def _interface(hosts: tuple[places.Host, ...]) -> str | None:
    others = (host for host in hosts[:_ASKED_FOR_ROUTE] if not host.is_here)
    return next(filter(None, (interface_to(host.name) for host in others)), None)


def _check(wanted: Wanted, overrides: Sequence[str], *, quiet: bool) -> int:
    """``dsframe check`` for this engine and number of processes; its words are for the person, not for a pipe. ``quiet``: only
    where something is wrong."""
    words = [str(wanted.config.path), "-np", str(wanted.job.processes), "--engine", wanted.engine]
    for override in overrides:
        words += ["--set", override]
    said = io.StringIO()
    with contextlib.redirect_stdout(said if quiet else sys.stderr):
        code = check.main(words)
    if code:
        print(said.getvalue(), end="", file=sys.stderr)
    return code


def _run(wanted: Wanted, options: argparse.Namespace) -> int:
    attempts = Attempts(wanted.directory, restarts=options.restarts, wait_seconds=options.restart_wait)

    def attempt(resume: bool, received: list[int]) -> int:
        job = replace(wanted.job, port=free_port())
        job = launchers.with_arguments(job, *(["--resume", "auto"] if resume else []))
        if "--quiet" not in job.arguments:
            say(launchers.plan(wanted.launcher, job).show(job.hosts, most=4))
        job = launchers.with_arguments(job, "--report", str(attempts.report))
        launch = launchers.plan(wanted.launcher, job)
        launch = launch if "--verbose" in job.arguments else launchers.quietly(launch)
        return _start(launch, received)

    try:
        return attempts.run(attempt)
    except OSError as error:
        raise DsframeError(
            f"{error.filename}: {error.strerror}; is the run's folder writable? --run-dir chooses another"
        ) from None


def _start(launch: Launch, received: list[int]) -> int:
    (command,) = launch.commands
    environment = {**os.environ, **launch.environment}
    return supervise.run(
        launchers.program(command[0]),
        [*command[1:]],
        environment,
        gentle=True,
        forwards=launch.forwards,
        received=received,
    )

"""``dsframe launch``: checks a file, chooses its launcher, and runs the job to its end."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsframe import engines
from dsframe.cluster import world as worlds
from dsframe.cluster.rendezvous import free_port, interface_to
from dsframe.config import Config, Facts, load
from dsframe.config.read.suggest import near_path
from dsframe.errors import ConfigError, DsframeError, WorldError
from dsframe.host import streams, supervise
from dsframe.run_dir.output import directory_of
from dsframe.tools import check
from dsframe.tools.commands import Argv, command
from dsframe.tools.launch import devices, hosts, launchers
from dsframe.tools.launch.attempts import Attempts, say
from dsframe.tools.launch.launchers import Job, Launch
from dsframe.train import parse as parse_training
from dsframe.train import parser as training_parser

EPILOG = """\
All other options go to dsframe.train, before or after "--":
  dsframe launch --config zero3.json -np 4 --set dsframe.steps=100 --run-dir runs/short

Hosts: -H, a host file ("host slots=4" a line), or those of the Slurm allocation that this runs in. The
launcher reaches them by itself: deepspeed by pdsh, horovodrun and mpirun by ssh, srun by Slurm.
Without -np: one process for each slot; without hosts: one for each GPU of this machine.

exit codes: those of a training process (`dsframe explain` lists them), or 1 if the launcher gave no better one.
With --restarts a failed run continues from its newest checkpoint; the same failure at the same step ends it.
"""


_PROCESSES = frozenset(
    {
        "--num_gpus",
        "--num-gpus",
        "--num_processes",
        "--num-processes",
        "--nproc_per_node",
        "--nproc-per-node",
        "--nprocs",
    }
)
"""Other launchers' names for -np."""


@dataclass(frozen=True)
class Request:
    """The parsed command line."""

    config: Config
    engine: str
    launcher: str
    job: Job
    training: argparse.Namespace
    """Options of dsframe.train."""
    directory: Path


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Train on this machine or many, with the launcher that belongs to the file."
    training = training_parser().format_help().partition("options:")[2].partition("Start it with")[0]
    result = command("launch", about, f"{EPILOG}\noptions of dsframe.train:{training.rstrip()}", allow_abbrev=False)
    add = result.add_argument
    add("-np", "--processes", type=int, metavar="N", help="number of processes in all")
    where = result.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:N,...", help="hosts, and the processes on each")
    where.add_argument("--hostfile", metavar="FILE", type=Path, help="the same, from a file")
    default = "default: the engine's own; srun in Slurm"
    add("--launcher", choices=("auto", *launchers.NAMES), default="auto", help=default)
    interface = "network interface to the other hosts (default: the one that leads there)"
    add("--interface", metavar="NAME", help=interface)
    add("--script", metavar="FILE", help="your program that ends in dsframe.main(task)")
    add("--print", action="store_true", dest="show", help="print the command instead of running it")
    add("--restarts", type=int, default=0, metavar="N", help="restart up to N times if the run fails")
    wait = "before the first restart; doubled after each that saves nothing new (default: %(default)s)"
    add("--restart-wait", type=float, default=1.0, metavar="SECONDS", help=wait)
    return result


def main(argv: Argv = None) -> int:
    """Runs the job and returns its exit code. Raises DsframeErrors."""
    options, arguments = parser().parse_known_args(argv)
    if other := next((word for word in arguments if word.partition("=")[0] in _PROCESSES), None):
        parser().error(f"unrecognized arguments: {other}; the number of processes in all is -np N")
    if script := next((word for word in arguments if word.endswith(".py") and Path(word).is_file()), None):
        parser().error(f"unrecognized arguments: {script}; did you mean --script {script}?")
    if options.processes is not None and options.processes < 1:
        parser().error("-np must be at least 1")
    if options.restarts < 0:
        parser().error("--restarts must be at least 0")
    request = read(options, [word for word in arguments if word != "--"])
    launch = launchers.plan(request.launcher, request.job)
    if options.show:
        print(launch)
        return 0
    if options.script and not Path(options.script).is_file():
        parser().error(f"--script: {options.script} is not a file{near_path(Path(options.script))}")
    streams.survive()
    if code := _check(request, program=bool(options.script)):
        return code
    return _run(request, options)


def read(options: argparse.Namespace, arguments: Sequence[str]) -> Request:
    """Parses the command line. Raises ConfigError and WorldError."""
    outside = worlds.read(os.environ)
    if outside.launcher not in ("python", "srun"):
        raise WorldError(
            f"this shell has the variables of {outside.launcher} (rank {outside.rank} of {outside.size}): "
            "dsframe launch starts a launcher and cannot run under one; unset them"
        )
    training = parse_training(arguments)
    config = load(training.config, overrides=training.set)
    job = _job(options, config, arguments)
    launcher = options.launcher
    ambiguous = launcher in ("auto", "python")
    engine = engines.choose(config, "deepspeed" if ambiguous else launcher).name
    launcher = launchers.natural(engine, job) if launcher == "auto" else launcher
    task = Path(options.script).stem if options.script else "Task"
    return Request(config, engine, launcher, job, training, directory_of(config, engine, task))


def _job(options: argparse.Namespace, config: Config, arguments: Sequence[str]) -> Job:
    allocated = hosts.from_slurm(os.environ)
    given = allocated
    if options.hosts:
        given = hosts.parse(options.hosts.split(","), f"-H {options.hosts}")
    elif options.hostfile:
        given = hosts.read_file(options.hostfile)
    allocation = bool(given) and given is allocated
    slots = sum(host.slots for host in given)
    processes = options.processes or slots
    if slots and processes > slots:
        remedy = "raise slots or lower -np"
        raise WorldError(f"{processes} processes, but the hosts have {slots} slots: {hosts.show(given)}; {remedy}")
    address = given[0].name if given else "127.0.0.1"
    if len(given) == 1 and given[0].is_here and not allocation:
        given, address = (), "127.0.0.1"
    gpus = devices.visible(os.environ)
    processes = processes or len(gpus)
    if not processes:
        raise WorldError("this machine has no GPU; write how many processes to start: -np N")
    mask = os.environ.get("CUDA_VISIBLE_DEVICES") if gpus and not given else None
    if mask is not None and processes > len(gpus):
        raise WorldError(
            f"-np {processes}, but CUDA_VISIBLE_DEVICES={mask} shows {len(gpus)}: start no more, name more "
            "GPUs there, or hide all of them (CUDA_VISIBLE_DEVICES= ... --launcher torchrun) to train on the CPU"
        )
    others = [host.name for host in given if not host.is_here][:1]
    return Job(
        processes=processes,
        program=(options.script,) if options.script else ("-m", "dsframe.train"),
        arguments=tuple(arguments),
        hosts=given,
        hostfile=options.hostfile,
        gpus=() if mask is None else gpus[:processes],
        threads=_threads(config, max((host.slots for host in given), default=processes), allocation=allocation),
        address=address,
        port=free_port(),
        interface=options.interface or next(map(interface_to, others), None),
        allocation=allocation,
    )


def _threads(config: Config, local_processes: int, *, allocation: bool) -> int:
    """Returns the threads of a process; in a Slurm allocation those of ``--cpus-per-task``."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, len(os.sched_getaffinity(0)) // local_processes)
    tasks = os.environ.get("SLURM_CPUS_PER_TASK", "") if allocation else ""
    written = next((int(text) for text in (tasks, given) if text.isdigit()), share)
    return config.settings.threads_per_rank or written


def _check(request: Request, *, program: bool) -> int:
    """Runs ``dsframe check`` for this run, printing to standard error, with --quiet only errors."""
    label = str(request.config.path)
    options = check.parser().parse_args([label, "-np", str(request.job.processes), "--engine", request.engine])
    options.starts, options.program = True, program
    facts = Facts(world_size=options.processes, engine=options.engine)
    examined = check.judged(request.config.examine(facts), label, options)
    wrong = any(problem.severity == "error" for problem in examined.problems)
    if wrong or not request.training.quiet:
        with contextlib.redirect_stdout(sys.stderr):
            check.show([(label, examined)], options)
    return ConfigError.exit_code if wrong else 0


def _run(request: Request, options: argparse.Namespace) -> int:
    wait = options.restart_wait
    attempts = Attempts(request.directory, restarts=options.restarts, wait_seconds=wait)

    def attempt(resume: bool, received: list[int]) -> int:
        job = replace(request.job, port=free_port())
        job = launchers.with_arguments(job, *(["--resume", "auto"] if resume else []))
        if not request.training.quiet:
            say(str(launchers.plan(request.launcher, job)))
        launch = launchers.plan(request.launcher, launchers.with_arguments(job, "--report", str(attempts.report)))
        return _start(launch if request.training.verbose else launchers.quietly(launch), received)

    try:
        return attempts.run(attempt)
    except OSError as error:
        remedy = "is the run's folder writable? --run-dir chooses another"
        raise DsframeError(f"{error.filename}: {error.strerror}; {remedy}") from None


def _start(launch: Launch, received: list[int]) -> int:
    name, *words = launch.command
    return supervise.run(
        launchers.program(name),
        words,
        {**os.environ, **launch.environment},
        gentle=True,
        forwards=launch.forwards,
        received=received,
    )

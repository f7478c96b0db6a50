"""``python -m dsframe.train``: one process of a training run, under any launcher.

The configuration is read and checked before torch is imported and before a process group exists. One process of the
node prints an error; the others exit with the same code.
"""

from __future__ import annotations

import argparse
import atexit
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from dsframe.arguments import Parser
from dsframe.cluster import world as worlds
from dsframe.cluster.world import World
from dsframe.config import default_config, load
from dsframe.errors import ConfigError, DataError, DsframeError, StoppedError, TaskError, TrainingError
from dsframe.host import streams, supervise
from dsframe.run_dir import outcome, output
from dsframe.text import shown

if TYPE_CHECKING:
    from dsframe.tasks.task import Task

_PATIENCE_SECONDS = 10.0
_FIRST_SPEAKS_SECONDS = 3.0
"""By then the launcher, which may poll once a second, has ended the ranks that made the same mistake as rank 0."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog="dsframe.train",
        description='Train as a DeepSpeed configuration file with a "dsframe" section says.',
        epilog="Start it with deepspeed, horovodrun, torchrun, mpirun, srun or plain python. README.md leads on.",
    )
    parser.add_argument(
        "--config",
        "--deepspeed_config",
        metavar="FILE",
        help="a path, or the name of a file in ds_configs/ (default: config.json of this folder, else zero3.json)",
        default=default_config(),
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override one key, such as --set zero_optimization.stage=2 (JSON values)",
    )
    parser.add_argument("--engine", help="short for --set dsframe.engine=...")
    parser.add_argument("--run-dir", help="short for --set dsframe.run_dir=...")
    parser.add_argument(
        "--resume",
        metavar="auto|best|PATH|never",
        default="never",
        help="auto: resume from the newest whole checkpoint in the run's directory, or start from step 0 if it has none; best: "
        "from the best one there (keep_best); PATH: from this checkpoint; never: start from step 0 (default: %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="let the libraries say everything, and show tracebacks")
    parser.add_argument("--quiet", action="store_true", help="print nothing; the run's directory has the metrics")
    # DeepSpeed's launcher puts it first.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", help=argparse.SUPPRESS)  # file where dsframe launch reads how the run ended
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # DeepSpeed scripts take it
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options. Options that are short for ``--set`` are appended to ``set``."""
    options = parser().parse_args(argv)
    for name in ("engine", "run_dir"):
        value = getattr(options, name)
        if value is not None:
            options.set.append(f"dsframe.{name}={value}")
    return options


def main(task: Task | None = None, argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says and returns 0; an error ends the process with its exit code (``dsframe.errors``).

    ``task``: the calling script's task, in place of the file's. ``argv``: in place of ``sys.argv[1:]``.
    """
    options = parse(argv)
    streams.survive()
    world = World()
    try:
        world = worlds.here()
        reporter = outcome.start(options.report, world.rank)
        if world.launcher != "python":
            supervise.die_with_parent()
        config = load(options.config, overrides=options.set)
        launched = options.report is not None  # dsframe launch has already printed the problems
        if world.is_main and not options.quiet and not launched:
            for problem in config.problems:
                # Not printed: dsframe check --resolved and the run report the first two, and the third is intended.
                if problem.code not in ("auto", "auto-later", "imports"):
                    print(shown(str(problem), sys.stderr), file=sys.stderr)
        from dsframe.run import choose, execute

        choice, resume = choose(config, world), options.resume
        with output.marked(world):
            execute(
                config,
                task=task,
                world=world,
                resume=resume,
                verbose=options.verbose,
                quiet=options.quiet,
                choice=choice,
            )
        if worlds.here().is_main:
            reporter.say(done=True)
    except DsframeError as error:
        leave(error, world, verbose=options.verbose)
    except KeyboardInterrupt:
        leave_at_once(130)
    except SystemExit as error:
        ended = (
            f"code called by the training ended this process: sys.exit({error.code!r}); the training is not complete"
        )
        leave(TaskError(f"{ended}. Raise an error instead, or leave out the call"), world, verbose=options.verbose)
    except Exception as error:
        crash(error, world, verbose=options.verbose)
    return 0


def crash(error: Exception, world: World, *, verbose: bool) -> NoReturn:
    """Ends this process after an exception: reports the user's frames, the traceback, or that another process ended."""
    if isinstance(error, RuntimeError) and re.search(r"DataLoader worker \(pid", str(error)):
        # torch raises this wherever the process is at that moment, perhaps in the task's code.
        what = f"a process that reads data has ended, perhaps because memory was short: {str(error).strip()}"
        leave(DataError(f"{what}; continue with --resume auto, and with fewer workers"), world, verbose=verbose)
    if verbose or not lost_a_peer(error):
        from dsframe.guard import user_code  # late: it imports torch

        trace = user_code.user_traceback(error)
        passing = trace is None or user_code.is_transient(error)
        code = 1 if passing else TaskError.exit_code
        outcome.reporter().failed(code, f"{type(error).__name__}: {error}")
        text = traceback.format_exc() if trace is None or verbose else f"error: {trace} [{TaskError.code}]"
        if not world.is_main:
            time.sleep(_FIRST_SPEAKS_SECONDS)
        print(shown(f"[rank {world.rank}] {text}", sys.stderr), file=sys.stderr, flush=True)
        leave_at_once(code)
    reason = str(error).strip().partition("\n")[0]
    outcome.reporter().failed(TrainingError.exit_code, outcome.LOST_A_PEER)
    print(f"[rank {world.rank}] {outcome.LOST_A_PEER}, see its message ({reason})", file=sys.stderr, flush=True)
    # The launcher ends this process, and reports the exit code of the one that failed.
    time.sleep(_PATIENCE_SECONDS)
    leave_at_once(TrainingError.exit_code)


def leave(error: DsframeError, world: World, *, verbose: bool) -> NoReturn:
    """Prints the error, on one rank of the node, and ends this process.

    An error in the file or the environment occurs on all ranks, so the node's first process prints it. The others wait
    for the launcher, which ends all processes when one has ended. A rank still alive after 10 s reports its own error.
    """
    outcome.reporter().failed(error.exit_code, str(error))
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    speaker = 1 if error.first_is_gone else 0
    stopped = isinstance(error, StoppedError)  # all ranks stop together; no other rank has an error to report
    if world.local_rank != speaker:
        time.sleep(1.0 if stopped else _PATIENCE_SECONDS)
    if world.local_rank != 0 and stopped:
        leave_at_once(error.exit_code)
    where = "" if world.local_rank == speaker else f"[rank {world.rank}] "
    # Editors make a link of file:line:column at the start of a line.
    name = "" if isinstance(error, ConfigError) else "dsframe: "
    print(shown(f"{where}{name}{error.printed}", sys.stderr), file=sys.stderr, flush=True)
    leave_at_once(error.exit_code)


def lost_a_peer(error: Exception) -> bool:
    """True if communication failed because another process ended, judged by the messages of Gloo, NCCL and Horovod."""
    signs = (
        r"Connection (closed|reset) by peer|Broken pipe|remote process exited|has been shut down|peer.* (died|exited)"
    )
    return isinstance(error, RuntimeError) and re.search(signs, str(error)) is not None


def leave_at_once(code: int) -> NoReturn:
    """Ends this process without waiting for peers: exit handlers of communication libraries may wait forever.

    C++ destructors do not run either; some end in SIGABRT after a successful training (measured, torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    done = main()
    atexit._run_exitfuncs()  # loggers flush
    leave_at_once(done)

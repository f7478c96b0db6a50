"""Starts a node's ranks and ends with them, like ``deepspeed.launcher.launch``, without DeepSpeed or torch.

    python -S -u dsframe/host/ranks.py --num=2 --port=29500 [--no_local_rank] [--no_python] [--module] PROGRAM [ARGUMENTS]

Each rank gets the same environment and command line, and exit codes are the same;
``tests/unit/test_launch_commands.py`` compares them with DeepSpeed's. Only for CPUs: on GPUs DeepSpeed's accelerator
chooses the variable that selects devices. Notices the end of a rank at once; DeepSpeed polls once a second. Standard
library only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from dsframe.host import supervise

PATIENCE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL, as in DeepSpeed's launcher."""


def variables(rank: int, number: int, port: int) -> dict[str, str]:
    """Returns the environment variables of a rank on a single node. Source: ``launcher/launch.py`` (main) and
    ``accelerator/cpu_accelerator.py`` of DeepSpeed 0.19.8."""
    return {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # from DeepSpeed's import
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(number))),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(number),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "LOCAL_SIZE": str(number),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def command(rank: int, python: str, options: Sequence[str], program: Sequence[str]) -> list[str]:
    """Returns a rank's command line."""
    prefix = [] if "--no_python" in options else [python, "-u", *(["-m"] if "--module" in options else [])]
    option = [] if "--no_local_rank" in options else [f"--local_rank={rank}"]
    return [*prefix, program[0], *option, *program[1:]]


def run(
    number: int, port: int, python: str, options: Sequence[str], program: Sequence[str], environ: Mapping[str, str]
) -> int:
    """Runs the ranks. Returns 0, the code of the first that failed, or 1 after SIGINT and SIGTERM."""
    heard = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    ranks = set()
    for rank in range(number):
        argv = command(rank, python, options, program)
        environment = {**environ, **variables(rank, number, port)}
        try:
            ranks.add(os.posix_spawnp(argv[0], argv, environment, setsigmask=[], setsigdef=supervise.IGNORED))
        except OSError as error:
            print(f"deepspeed: {argv[0]}: {error.strerror}", file=sys.stderr)
            end(ranks)
            return 127
    while ranks:
        arrived = signal.sigwait(heard)
        if arrived != signal.SIGCHLD:
            end(ranks)
            return 1
        for pid, status in supervise.ended_children():
            ranks.discard(pid)
            if code := os.waitstatus_to_exitcode(status):
                end(ranks)
                return code  # sys.exit(-9) is 247, as DeepSpeed's
    return 0


def end(ranks: set[int]) -> None:
    """Ends all descendants of this process: asks them first, then kills them."""
    limit = time.monotonic() + PATIENCE_SECONDS
    supervise.signal_descendants(signal.SIGTERM)
    while any(supervise.descendants()):
        if time.monotonic() > limit:
            supervise.signal_descendants(signal.SIGKILL)
        for pid, _ in supervise.ended_children():
            ranks.discard(pid)
        time.sleep(0.02)


def main(argv: list[str]) -> int:
    """Parses the command line: options come first, in any order, one word each."""
    options = list(argv[: next(at for at, argument in enumerate(argv) if not argument.startswith("--"))])
    values = dict(argument.lstrip("-").split("=", 1) for argument in options if "=" in argument)
    program = argv[len(options) :]
    return run(int(values["num"]), int(values["port"]), values["python"], options, program, os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

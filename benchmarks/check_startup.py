"""How long ``dsframe check`` takes, from typing it to the verdict: the median of 10 runs.

    python benchmarks/check_startup.py [FILE ...]

The bound is 0.3 s: what an editor or a pre-commit hook may take. Each run is a new process; the table also shows what
Python itself, and pydantic's import, take on this machine. Compiled modules are cached, as after the first run of any
installation; where PYTHONDONTWRITEBYTECODE is set, it is left out.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RUNS = 10
BOUND_SECONDS = 0.3

BAD = """\
{
  "train_batch_size": 32,
  "zero_optimisation": {"stage": 2, "overlap_com": true},
  "offload_optimizer": {"device": "cpu"},
  "optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}
}
"""


def median_seconds(command: list[str], stdin: str = "") -> tuple[float, float]:
    """Wall-clock and CPU time of a command, the medians of ``RUNS`` runs after one that fills the caches."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    walls, processor = [], []
    for _ in range(RUNS + 1):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            command,
            input=stdin.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=REPOSITORY,
            env=environment,
            timeout=60,
        )
        walls.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(walls[1:]), statistics.median(processor[1:])


def main(arguments: list[str]) -> int:
    """Print the table. Returns 1 when a check takes longer than the bound."""
    check = [sys.executable, "-m", "dsframe.cli", "check"]
    rows = [
        ("python -c pass", [sys.executable, "-c", "pass"], ""),
        ("python -c 'import pydantic.main'", [sys.executable, "-c", "import pydantic.main"], ""),
    ]
    files = arguments or ["ds_configs/zero3.json"]
    checks = [(f"dsframe check {file}", [*check, file], "") for file in files]
    checks.append(("dsframe check - (5 mistakes, with suggestions)", [*check, "-"], BAD))
    slow = False
    print("   clock  processor")
    for label, command, stdin in rows + checks:
        seconds, processor = median_seconds(command, stdin)
        print(f"{seconds:7.3f} s  {processor:7.3f} s  {label}")
        slow = slow or (seconds > BOUND_SECONDS and "dsframe" in label)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = f" (a load of {load:.1f} on {cores} cores: compare the processor's time)" if load > cores else ""
    print(f"bound: {BOUND_SECONDS} s by the clock, median of {RUNS}: {'exceeded' if slow else 'kept'}{busy}")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

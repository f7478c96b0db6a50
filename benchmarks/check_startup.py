"""How long ``dsframe check`` takes, from typing it to the verdict: the median of 10 runs.

    python benchmarks/check_startup.py [FILE ...]

The bound is 0.3 s: what an editor or a pre-commit hook may take. Each run is a new process; the table also shows what
Python itself, and pydantic's import, take on this machine. Compiled modules are cached, as after the first run of any
installation; where PYTHONDONTWRITEBYTECODE is set, it is left out.
"""

from __future__ import annotations

import os
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


def median_seconds(command: list[str], stdin: str = "") -> float:
    """Wall-clock time of a command, the median of ``RUNS`` runs after one that fills the caches."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run(
            command,
            input=stdin.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=REPOSITORY,
            env=environment,
            timeout=60,
        )
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


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
    for label, command, stdin in rows + checks:
        seconds = median_seconds(command, stdin)
        print(f"{seconds:7.3f} s  {label}")
        slow = slow or (seconds > BOUND_SECONDS and "dsframe" in label)
    print(f"bound: {BOUND_SECONDS} s, median of {RUNS}: {'exceeded' if slow else 'kept'}")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

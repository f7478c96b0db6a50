"""How long ``dsframe check`` takes, from typing it to the verdict, beside a process that imports pydantic and defines one model.

    python benchmarks/check_startup.py [FILE ...]

Medians of runs in turns, each a new process. The bound is on the ratio of processor time, which is the same on a slow machine and
hardly moves with other work beside it: ``RATIO`` for files without mistakes. Compiled modules are cached, as after the first run of
any installation; where PYTHONDONTWRITEBYTECODE is set, it is left out.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RUNS = 15
RATIO = 1.3
MODEL = "from pydantic import BaseModel\nclass Model(BaseModel):\n    size: int = 1"

BAD = """\
{
  "train_batch_size": 32,
  "zero_optimisation": {"stage": 2, "overlap_com": true},
  "offload_optimizer": {"device": "cpu"},
  "optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}
}
"""


def once(command, stdin=""):
    """Wall-clock and processor time of one run of a command, in seconds."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
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
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(arguments):
    """Print the table. Returns 1 when a check of a file without mistakes takes more than the bound."""
    check = [sys.executable, "-m", "dsframe.cli", "check"]
    rows = {
        "python -c pass": ([sys.executable, "-c", "pass"], ""),
        "pydantic and one model": ([sys.executable, "-c", MODEL], ""),
        **{f"dsframe check {file}": ([*check, file], "") for file in arguments or ["ds_configs/zero3.json"]},
        "dsframe check - (5 mistakes, with suggestions)": ([*check, "-"], BAD),
    }
    found = {label: [] for label in rows}
    for _ in range(RUNS + 1):
        for label, (command, stdin) in rows.items():
            found[label].append(once(command, stdin))
    walls, processor = (
        {label: statistics.median(run[which] for run in runs[1:]) for label, runs in found.items()} for which in (0, 1)
    )
    slow = False
    print("  clock  processor  beside pydantic and one model")
    for label in rows:
        ratio = processor[label] / processor["pydantic and one model"]
        print(f"{walls[label]:5.3f} s    {processor[label]:5.3f} s  {ratio:5.2f}  {label}")
        slow = slow or (ratio > RATIO and "dsframe" in label and "mistakes" not in label)
    print(f"bound: {RATIO} by processor time, medians of {RUNS}: {'exceeded' if slow else 'kept'}")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

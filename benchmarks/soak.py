"""Thousands of steps: does a run get slower, does its memory grow?

    python -m benchmarks.soak                            # 5,000 steps of a small GPT on DDP, ZeRO-1, ZeRO-3 and Horovod
    python -m benchmarks.soak --engines zero3 --steps 20000

Two processes, one thread each. A machine has its own ups and downs over minutes, so the run's two ends by themselves prove little:
when a job has taken its steps, another one is started, and the old and the young one run in turns, a block each
(``benchmarks.match``). Fails where the old one is slower than the young one by more than ``SLOWER`` (the median of the rounds), or
a rank's memory grows from the first tenth of the run to its end by more than ``GROWS`` and ``GROWS_BYTES``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import processes
from benchmarks.compare import ours
from benchmarks.match import RANKS, Job

SLOWER = 0.03
GROWS, GROWS_BYTES = 0.01, 10e6
WARM_UP_STEPS = 100
"""Of the young one."""


@dataclass(frozen=True)
class Ends:
    """Both ends of one run, and a young run beside its end."""

    rates: tuple[float, float]
    """Steps a second of the first and of the last tenth."""
    ratios: Sequence[float]
    """The old one's rate as so many times the young one's, round by round."""
    cpu_ratios: Sequence[float]
    """The same for steps a second of processor time."""
    resident: tuple[float, float]
    """Bytes of a rank, the mean over the ranks, after the first tenth and at the end."""

    @property
    def problems(self):
        """What is not as it should be; empty where all is."""
        ratio, (before, after) = statistics.median(self.ratios), self.resident
        found = []
        if ratio < 1 - SLOWER:
            found.append(f"slower by {1 - ratio:.1%}")
        if after - before > GROWS * before + GROWS_BYTES:
            found.append(f"a rank's memory grows by {(after - before) / 1e6:.1f} MB")
        return found


def contestant(engine):
    """A small model, so that what surrounds it is most of a step."""
    usual = ours(engine, "gpt")
    assert usual.config is not None
    section = {**usual.config["dsframe"], "log_every_steps": 20}
    return replace(usual, config={**usual.config, "train_batch_size": 8, "dsframe": section})


def soak(engine, steps, rounds, block_seconds):
    """One run of so many steps, and a young one after it."""
    with tempfile.TemporaryDirectory(prefix="dsframe-soak-") as name, contextlib.ExitStack() as stack:

        def start(which):
            job = Job(contestant(engine), "tiny", Path(name, which))
            stack.callback(job.end)
            job.meet()
            return job

        old = start("old")
        tenth = max(1, steps // 10)
        taken, sizes = [], []
        for _ in range(10):
            taken.append(old.block(0, tenth)[0])
            sizes.append(old.resident_bytes())
        young = start("young")
        young.block(0, WARM_UP_STEPS)
        count = max(5, round(block_seconds * tenth / taken[-1]))
        ratios, cpu_ratios = [], []
        for number in range(rounds):
            pair = (old, young) if number % 2 == 0 else (young, old)
            spent = {job: job.block(max(1, count // 10), count) for job in pair}
            ratios.append(spent[young][0] / spent[old][0])
            cpu_ratios.append(spent[young][1] / spent[old][1])
    return Ends((tenth / taken[0], tenth / taken[-1]), ratios, cpu_ratios, (sizes[0], sizes[-1]))


def main(argv=None):
    """Prints the table. Returns 1 where a run gets slower or grows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="ddp,zero1,zero3,horovod", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5000, help="of the old one (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="of both in turns (default: %(default)s)")
    parser.add_argument("--block", type=float, default=2.0, help="seconds of a block (default: %(default)s)")
    options = parser.parse_args(argv)
    processes.heed_sigterm()
    print(
        f"{options.steps:,} steps, {RANKS} processes; then {options.rounds} rounds of {options.block:g} s beside a young run"
    )
    print(f"{'':10}{'steps/s, first and last tenth':>30}{'old / young':>21}{'by CPU time':>21}{'MB of a rank':>20}")
    failed = False
    for engine in options.engines.split(","):
        found = soak(engine, options.steps, options.rounds, options.block)
        failed = failed or bool(found.problems)
        beside = "".join(
            f"{statistics.median(ratios):6.3f} ({min(ratios):.2f}-{max(ratios):.2f})".rjust(21)
            for ratios in (found.ratios, found.cpu_ratios)
        )
        before, after = found.resident
        sizes = f"{before / 1e6:12.1f}{after / 1e6:8.1f}"
        verdict = "; ".join(found.problems) or "kept"
        print(f"{engine:10}{found.rates[0]:20.1f}{found.rates[1]:10.1f}{beside}{sizes}  {verdict}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

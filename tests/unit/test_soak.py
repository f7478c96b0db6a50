"""What the benchmarks take for slower, larger and different, and that they leave nothing behind; the runs are the commands'."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import processes
from benchmarks.compare import plot, rows
from benchmarks.match import Result
from benchmarks.soak import Ends


def ends(ratios: list[float], growth: float) -> Ends:
    return Ends((100.0, 90.0), ratios, ratios, (400e6, 400e6 + growth))


def test_a_run_that_stays_as_it_is() -> None:
    """Whatever the machine does between its two ends."""
    assert ends([1.01, 0.7, 0.99, 1.0, 1.3], 5e6).problems == []


def test_a_run_that_gets_slower_or_grows() -> None:
    assert ends([0.95, 0.96, 0.97, 0.94, 1.3], 0).problems == ["slower by 4.0%"]
    assert ends([1.0], 15e6).problems == ["a rank's memory grows by 15.0 MB"]


def played(losses: list[float]) -> Result:
    return Result(rates=[1.0], cpu_rates=[1.0], losses=losses, peak_bytes=[1])


@pytest.mark.parametrize(("loss", "same"), [(2.0, True), (2.1, False), (math.nan, False)])
@pytest.mark.parametrize("place", [0, 1])
def test_losses_that_are_the_same(loss: float, same: bool, place: int) -> None:
    theirs = [2.0, 2.0]
    theirs[place] = loss
    results = {"dsframe": played([2.0, 2.0]), "other": played(theirs)}
    row = rows("ddp", "cnn", results)[1]
    assert row["same_losses"] == same
    assert math.isnan(row["loss_difference"]) == math.isnan(loss)


def test_nothing_to_draw(tmp_path: Path) -> None:
    table = rows("ddp", "cnn", {"dsframe": played([2.0]), "other": played([2.0])})
    assert plot(table, tmp_path / "both.svg")
    assert not plot(table[:1], tmp_path / "one.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["both.svg"]


def test_a_job_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    """Not even one that has its own session, as torchrun's and horovodrun's ranks have, and that is stopped."""
    rank = tmp_path / "rank"
    lines = [
        "import pathlib, os, signal, subprocess, sys, time",
        "child = subprocess.Popen(['sleep', '100'], start_new_session=True)",
        "os.kill(child.pid, signal.SIGSTOP)",
        f"pathlib.Path({str(rank)!r}).write_text(str(child.pid))",
        "time.sleep(100)",
    ]
    with processes.job([sys.executable, "-c", "\n".join(lines)]) as job:
        until = time.monotonic() + 30
        while not (rank.exists() and rank.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        assert len(job.members()) == 2
    assert job.members() == []
    left = int(rank.read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run(["sleep", "100"], timeout=0.2)
    done = processes.run([sys.executable, "-c", "print('said')"], timeout=30)
    assert (done.returncode, done.stdout) == (0, "said\n")

"""What the benchmarks take for slower, larger and different, and that they leave nothing behind; the runs are the commands'."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import processes
from benchmarks.soak import Ends
from tests.processes import Running, run_ranks


def ends(ratios: list[float], growth: float) -> Ends:
    return Ends((100.0, 90.0), ratios, ratios, (400e6, 400e6 + growth))


def test_a_run_that_stays_as_it_is() -> None:
    """Whatever the machine does between its two ends."""
    assert ends([1.01, 0.7, 0.99, 1.0, 1.3], 5e6).problems == []


def test_a_run_that_gets_slower_or_grows() -> None:
    assert ends([0.95, 0.96, 0.97, 0.94, 1.3], 0).problems == ["slower by 4.0%"]
    assert ends([1.0], 15e6).problems == ["a rank's memory grows by 15.0 MB"]


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


BENCHMARK = """
import sys, time
from benchmarks import processes
processes.heed_sigterm()
with processes.job([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--master-port=0", sys.argv[1]]):
    time.sleep(100)
"""
RANK = """
import os, pathlib, time
pathlib.Path(__file__).with_name("new").write_text(str(os.getpid()))
pathlib.Path(__file__).with_name("new").rename(pathlib.Path(__file__).with_name("pid"))
time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_stopped_leaves_no_rank(number: signal.Signals, tmp_path: Path) -> None:
    """By ``timeout``, which sends SIGTERM twice, and with ``-k`` SIGKILL. A second SIGTERM interrupted the end of the job."""
    (tmp_path / "benchmark.py").write_text(BENCHMARK)
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, str(tmp_path / "benchmark.py"), str(tmp_path / "rank.py")]

    def stop(running: Running) -> None:
        running.wait_for((tmp_path / "pid").exists, timeout_seconds=60, what="its rank ran")
        while running.process.poll() is None:
            running.process.send_signal(number)
            time.sleep(0.01)

    finished = run_ranks(command, timeout_seconds=100, settle_seconds=20, while_running=stop)
    assert finished.returncode == (143 if number == signal.SIGTERM else -number), finished

"""Checkpoints that a signal asks for, with real processes."""

import os
import re
import signal

from dsframe.checkpoint import store
from dsframe.checkpoint.store import Store
from tests import portability


def _wait_for_step(running, run_dir, step):
    def reached():
        return (run_dir / "metrics.jsonl").exists() and len(portability.losses(run_dir)) >= step

    running.wait_for(reached, timeout_seconds=60, what=f"step {step}")


def test_a_signal_to_one_rank_saves_and_stops_all(tmp_path):
    run_dir = tmp_path / "run"

    def ask(running):
        _wait_for_step(running, run_dir, 20)
        running.ranks()[1].send_signal(signal.SIGUSR1)

    setup = portability.SETUPS["ddp@2"]
    stopped = portability.train(setup, run_dir, steps=3000, while_running=ask)
    assert stopped.returncode == 75 or re.search(r"exitcode\s*: 75", stopped.stderr), "torchrun's own code is 1"
    assert "stopped after step" in stopped.stderr
    assert "signal to another rank" in stopped.stderr
    (saved,) = Store(run_dir / "checkpoints").newest_first()
    step = store.step_of(saved)
    assert step is not None
    assert store.verify(saved) == []
    assert max(portability.losses(run_dir)) == step
    # The schedule is longer: said.
    portability.train(setup, run_dir, "--resume", "auto", steps=step + 5, timeout_seconds=60)
    assert list(portability.losses(run_dir)) == list(range(1, step + 6))


def test_a_signal_to_every_process_saves_where_workers_read(tmp_path):
    run_dir = tmp_path / "run"

    def ask(running):
        _wait_for_step(running, run_dir, 1)
        os.killpg(running.process.pid, signal.SIGTERM)

    task = ("--set", 'dsframe.task={"name": "tests.faults.slow_task:ReadingTask"}')
    stopped = portability.train(portability.SETUPS["single@1"], run_dir, *task, steps=100_000, while_running=ask)
    assert stopped.returncode == 75, stopped
    assert "by SIGTERM; continue with --resume auto" in stopped.stderr
    assert len(list(Store(run_dir / "checkpoints").newest_first())) == 1

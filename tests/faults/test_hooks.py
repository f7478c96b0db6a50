"""Hooks on two ranks: called together, and named where one hangs; all ranks stop early together."""

import re

from dsframe.run_dir.record import read_summary
from tests.processes import run_ranks, warm

STOP = '{"metric": "loss:min", "patience": 1, "min_delta": 100.0}'


def run(tmp_path, fault, engine, *more):
    command = warm(
        2,
        [
            *("-m", "dsframe.train", "--config", "zero3.json", "--engine", engine, "--run-dir", "run"),
            *("--set", 'dsframe.hooks=["tests.faults.broken_hooks:Broken"]', *more),
            *("--set", 'dsframe.task={"name": "tests.faults.broken_hooks:Evaluated"}'),
        ],
    )
    return run_ranks(command, cwd=tmp_path, timeout_seconds=150, env={"FAULT": fault}, settle_seconds=1.0)


def test_a_hook_that_hangs_is_named(tmp_path):
    more = ("--set", "dsframe.steps=100000", "--set", "dsframe.hang_timeout_seconds=4")
    finished = run(tmp_path, "sleep", "ddp", *more)
    assert finished.returncode != 0
    assert re.search(r"IS MISSING there: it is in on_step, broken_hooks\.py:", finished.output)


def test_all_ranks_stop_early_together(tmp_path):
    more = ("--set", "dsframe.steps=100", "--set", "dsframe.eval_every_steps=3", "--set", f"dsframe.stop={STOP}")
    finished = run(tmp_path, "", "deepspeed", *more)
    finished.check()
    assert read_summary(tmp_path / "run")["steps"] == 6
    assert all(finished.output.count(f"hook on rank {rank}: True") == 2 for rank in (0, 1))

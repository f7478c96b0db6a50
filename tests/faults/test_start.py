"""Processes that do not come together, or are not alike: every one of them says which and why."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.cluster import jobs
from tests.processes import free_port, run_ranks


def ranks(numbers: tuple[int, ...], size: int, changes: dict[int, str]) -> list[str]:
    """A shell that starts these of ``size`` ranks as torchrun would; ``changes`` are options of some of them."""
    port = free_port()
    lines = []
    for rank in numbers:
        place = f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={rank} LOCAL_WORLD_SIZE={size}"
        options = f"--config small.json --run-dir run --engine ddp {changes.get(rank, '')}"
        lines.append(f"{place} MASTER_ADDR=127.0.0.1 MASTER_PORT={port} python -m dsframe.train {options} &")
        lines.append('pids="$pids $!"')
    return ["bash", "-c", "\n".join([*lines, "for pid in $pids; do wait $pid || code=$?; done", "exit $code"])]


def test_a_rank_that_never_arrives(tmp_path: Path) -> None:
    jobs.write(tmp_path)
    finished = run_ranks(ranks((0, 2), 4, {}), cwd=tmp_path, env={"DSFRAME_MEETING_SECONDS": "3"}, timeout_seconds=90)
    assert finished.returncode == 3, finished
    assert finished.stderr.count("ranks 1, 3 of 4 did not arrive within 3 s; did the launcher start") == 2


def test_a_rank_with_another_file_and_other_data(tmp_path: Path) -> None:
    jobs.write(tmp_path)
    other = shlex.quote("dsframe.task.samples=299")
    finished = run_ranks(ranks((0, 1), 2, {1: f"--set {other}"}), cwd=tmp_path, timeout_seconds=90)
    assert finished.returncode == 3, finished
    assert "the processes of this run differ: configuration is" in finished.stderr
    assert "training samples is 299 on rank 1 and 300 on rank 0" in finished.stderr
    assert "Traceback" not in finished.output


def test_a_rank_that_hangs_while_it_is_set_up_is_named(tmp_path: Path) -> None:
    jobs.write(tmp_path)
    task = shlex.quote('dsframe.task={"name": "tests.faults.broken_task:BrokenTask"}')
    options = f"--set {task} --set dsframe.hang_timeout_seconds=1"
    started = ranks((0, 1), 2, {0: options, 1: options})
    finished = run_ranks(started, cwd=tmp_path, env={"FAULT": "build"}, timeout_seconds=90)
    assert finished.returncode == 9, finished
    assert "the run hangs before its first step, while it is set up: no progress for" in finished.stderr
    assert "rank 0 waits in " in finished.stderr
    assert "rank 1 IS MISSING there: it is in model, broken_task.py:" in finished.stderr

"""Task.prepare(): one process does it before anybody reads; a failure ends all ranks with one message."""

import os
import shlex
import signal

import pytest

from tests.files import ds_config, write_json
from tests.processes import forked, free_port, horovodrun, run_ranks, torchrun, warm

TASK = {"name": "tests.faults.preparing_task:Preparing"}
FILE = ds_config(8, "SGD", 0.1)
ARGUMENTS = ["-m", "dsframe.train", "--config", "my.json", "--run-dir", "run"]


def write(folder):
    settings = {"task": TASK, "steps": 2, "engine": "ddp", "threads_per_rank": 1}
    write_json(folder / "my.json", FILE | {"dsframe": settings})
    (folder / "data").mkdir(exist_ok=True)


def data(folder, fault=""):
    return {"DSFRAME_DATA": str(folder / "data"), "FAULT": fault}


def processes(hosts, folders=("data", "data")):
    """Two ranks as torchrun would start them, each on a host of its own, or both on one; ``folders``: of each rank's data."""
    port, one = free_port(), len(set(hosts)) == 1
    lines = []
    for rank, host in enumerate(hosts):
        place = f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank if one else 0} LOCAL_WORLD_SIZE={2 if one else 1} GROUP_RANK={host}"
        lines.append(
            f"{place} MASTER_ADDR=127.0.0.1 MASTER_PORT={port} DSFRAME_DATA={folders[rank]} {shlex.join(warm(1, ARGUMENTS))} &"
        )
        lines.append('pids="$pids $!"')
    return ["bash", "-c", "\n".join([*lines, "for pid in $pids; do wait $pid || code=$?; done", "exit $code"])]


def calls(folder, name="data"):
    return len((folder / name / "calls").read_text().splitlines())


@pytest.mark.parametrize("launcher", [horovodrun, torchrun])
def test_one_process_prepares(launcher, tmp_path):
    write(tmp_path)
    finished = run_ranks(forked(launcher, 2, ARGUMENTS), cwd=tmp_path, env=data(tmp_path), timeout_seconds=120).check()
    assert calls(tmp_path) == 1
    assert finished.stderr.count("dsframe: preparing numbers") == 1


def test_one_process_of_each_host_prepares(tmp_path):
    """In a folder that hosts share one after the other."""
    write(tmp_path)
    run_ranks(processes((0, 1)), cwd=tmp_path, timeout_seconds=120).check()
    assert calls(tmp_path) == 2
    (tmp_path / "other").mkdir()
    run_ranks(processes((0, 1), ("data", "other")), cwd=tmp_path, timeout_seconds=120).check()
    assert (calls(tmp_path), calls(tmp_path, "other")) == (3, 1)


def errors(finished):
    """The messages, without who said them."""
    return {line[line.index("error: ") :] for line in finished.stderr.splitlines() if "error: " in line}


@pytest.mark.parametrize("hosts", [(0, 0), pytest.param((0, 1), marks=pytest.mark.long)])
def test_a_mistake_ends_all_ranks_with_one_message(hosts, tmp_path):
    write(tmp_path)
    finished = run_ranks(processes(hosts), cwd=tmp_path, env=data(tmp_path, "raise"), timeout_seconds=120)
    assert finished.returncode == 6, finished
    (line,) = errors(finished)
    assert line.startswith("error: Preparing.prepare() failed: ValueError: no such server (")
    assert line.endswith("preparing_task.py:32) [data]")
    assert finished.stderr.count("no such server") == 2, finished
    assert "Traceback" not in finished.output


def kill(run, folder):
    at = folder / "data" / "sleeps"
    run.wait_for(lambda: at.exists() and at.read_text(), timeout_seconds=60, what="it sleeps")
    os.kill(int(at.read_text()), signal.SIGKILL)


def test_a_killed_process_ends_all_ranks_and_leaves_nothing_that_is_taken_for_whole(tmp_path):
    write(tmp_path)
    finished = run_ranks(
        processes((0, 0)),
        cwd=tmp_path,
        env=data(tmp_path, "sleep"),
        timeout_seconds=60,
        while_running=lambda run: kill(run, tmp_path),
    )
    assert finished.returncode == 6, finished  # of rank 1
    (line,) = errors(finished)
    assert line.startswith("error: the process that prepared the data (rank 0) ended")
    assert line.endswith("what is half done is not used [data]")
    (tmp_path / "data" / "sleeps").unlink()
    run_ranks(processes((0, 0)), cwd=tmp_path, env=data(tmp_path), timeout_seconds=120).check()

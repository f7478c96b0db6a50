"""A run's directory is one run's: a second one is refused, and whoever comes after the first, however it ended, is not."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest

from dsframe import run
from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.errors import CheckpointError, ConfigError, WorldError
from dsframe.run_dir import lock
from dsframe.run_dir.lock import RunLock
from tests.engines.odd_task import Odd
from tests.files import ds_config

HOLD = """
import os, sys, time
from pathlib import Path
from dsframe.run_dir.lock import RunLock
from dsframe.cluster.world import World
RunLock().take(Path(sys.argv[1]), World(), print)
worker = os.fork()  # as workers that read data are
if worker:
    print(worker, flush=True)
time.sleep(600)
"""


@contextmanager
def held(directory):
    """Another process has it, and a worker; gives its number, and what kills it and leaves the worker."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True)
    worker = int(holder.stdout.readline())
    with ExitStack() as ending:
        ending.callback(holder.stdout.close)
        ending.callback(os.kill, worker, signal.SIGKILL)
        ending.callback(holder.wait)
        ending.callback(holder.kill)

        def kill():
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # is there

        yield holder.pid, kill


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.2)


def one_step_in(directory):
    return ds_config(4, "SGD", 0.01, engine="single", steps=1, threads_per_rank=1, run_dir=str(directory))


def test_a_second_run_is_refused_and_touches_nothing(tmp_path):
    """And the next one is not, though a worker of the run that was killed is still there."""
    file = one_step_in(tmp_path)
    partial = tmp_path / "checkpoints" / ".step-00000004.partial"
    partial.mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"run": {}}\n')
    with held(tmp_path) as (holder, kill):
        who = f"process {holder} on {socket.gethostname()}"
        with pytest.raises(
            WorldError, match=re.escape(f"{tmp_path} is in use by another run ({who}); ") + ".*--run-dir$"
        ):
            run.execute(load(file), task=Odd(), world=World(), quiet=True)
        assert partial.is_dir()
        assert (tmp_path / "metrics.jsonl").read_text() == '{"run": {}}\n'
        kill()
        run.execute(load(file), task=Odd(), world=World(), quiet=True)
        run.execute(load(file), task=Odd(), world=World(), quiet=True)  # twice in one process
    assert not partial.exists()


def test_one_that_is_about_to_end_is_waited_for(tmp_path, monkeypatch):
    said = []
    with held(tmp_path) as (holder, kill), RunLock() as own:
        naps = iter([lambda: None, kill])
        monkeypatch.setattr(lock.time, "sleep", lambda seconds: next(naps)())
        own.take(tmp_path, World(), said.append)
        assert own.held
    (line,) = said
    assert f"process {holder} on" in line
    assert (tmp_path / ".lock").read_text() == ""


def test_a_lock_that_is_refused_is_not_left_open(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", -1.0)
    with held(tmp_path):
        opened = psutil.Process().num_fds()
        with pytest.raises(WorldError):
            RunLock().take(tmp_path, World(), print)
        assert psutil.Process().num_fds() == opened


def test_a_job_that_slurm_started_again_goes_on(tmp_path, monkeypatch):
    """Its host may be down, and the lock still there for minutes."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with held(tmp_path), RunLock() as own:
        with pytest.raises(WorldError):
            own.take(tmp_path, World(), print)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        own.take(tmp_path, World(), print)
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        with pytest.raises(WorldError):
            own.take(tmp_path, World(), print)


def test_who_is_another_rank_in_the_next_training_lets_go(tmp_path):
    with RunLock() as own:
        own.take(tmp_path, World(), print)
        own.take(tmp_path, World(1, 2, 1, 2), print)
        assert not own.held
        with held(tmp_path):
            pass


def test_a_directory_that_another_run_has_made_anew_is_not_taken(tmp_path):
    """What this run holds it goes on holding: the one that was moved away."""
    place = tmp_path / "run"
    with RunLock() as own:
        own.take(place, World(), print)
        place.rename(tmp_path / "moved")
        with (
            held(place),
            pytest.raises(CheckpointError, match=r"is not this run's any more: .* is in use by another run"),
        ):
            own.renew(lambda line: None)
        assert own.held


def test_a_run_that_fails_lets_go(tmp_path):
    own = RunLock()
    with suppress(KeyboardInterrupt), own:
        own.take(tmp_path, World(), print)
        raise KeyboardInterrupt
    assert not own.held
    with held(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks(number, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with RunLock() as own:
        own.take(tmp_path, World(), print)
        assert not own.held


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_another_has_is_no_lack_of_locks(number, tmp_path, monkeypatch):
    """POSIX leaves it open which of the two says so."""

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with RunLock() as own, pytest.raises(WorldError, match="is in use by another run"):
        own.take(tmp_path, World(), print)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with RunLock() as own, pytest.raises(ConfigError, match=r"cannot be written to: Not a directory; .*--run-dir"):
        own.take(tmp_path / "file" / "run", World(), print)

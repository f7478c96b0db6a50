"""One job: what a launcher and its workers hear of a request to end."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from dsframe.host import processes, supervise
from tests.processes import REPOSITORY

JOB = """
import os, sys
from dsframe.host import supervise
sys.exit(supervise.run(sys.executable, ["-c", sys.argv[1]], dict(os.environ), gentle=True, received=[]))
"""
LOSES_THE_FIRST = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.default_int_handler))
print("deaf", flush=True)
"""
STARTS_A_WORKER = """
worker = "import signal, sys; sys.exit(signal.sigwait({signal.SIGUSR1}))"
blocks = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
time.sleep(0.5)
code = subprocess.run([sys.executable, "-c", worker], env={"LOCAL_RANK": "0"}, preexec_fn=blocks).returncode
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
IMPORTS = STARTS_A_WORKER.replace("signal.sigwait({signal.SIGUSR1})", "signal.pause()").replace(
    "SIG_BLOCK", "SIG_UNBLOCK"
)
NO_WORKER = "time.sleep(60)"


@pytest.mark.parametrize(
    ("launcher", "code"),
    [
        pytest.param(NO_WORKER, 128 + signal.SIGINT, id="the launcher ends"),
        pytest.param(STARTS_A_WORKER, signal.SIGUSR1, id="workers that came save"),
        pytest.param(IMPORTS, 128 + signal.SIGINT, id="a worker still imports"),
    ],
)
def test_a_request_that_a_starting_launcher_loses_is_repeated(launcher, code):
    """Python drops a signal that comes while it starts: one Ctrl-C shall do."""
    command = [sys.executable, "-c", JOB, LOSES_THE_FIRST + launcher]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "deaf\n"
        began = time.monotonic()
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=30) == code
        assert time.monotonic() - began >= supervise.UNHEARD_SECONDS
        assert "Ctrl-C" in job.stderr.read()


def test_nohup_keeps_a_job_from_saving_and_ending():
    worker = "sys.exit(subprocess.call(['sleep', '1'], env={'LOCAL_RANK': '0'}))"
    command = ["nohup", sys.executable, "-c", JOB, LOSES_THE_FIRST + worker]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as job:
        job.stdout.readline()
        time.sleep(0.3)
        job.send_signal(signal.SIGHUP)
        assert job.wait(timeout=30) == 0


CHILD = "import time; from dsframe.host import supervise; supervise.die_with_parent(); print('deaf', flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


@pytest.mark.parametrize("words", [[JOB, LOSES_THE_FIRST + NO_WORKER], [PARENT]])
def test_what_a_killed_process_has_started_ends(words):
    with subprocess.Popen([sys.executable, "-c", *words], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "deaf\n"
        job.kill()
        assert select.select([job.stdout], [], [], 10)[0], "its child lives"
        assert job.stdout.read() == ""


def test_what_takes_too_long_has_no_output():
    assert processes.output_of(["sleep", "9"], 0.1) is None


def test_processes_of_a_worker_are_asked_nothing():
    """They have its environment, and would be ended by what it saves at."""
    command, environment = ["sh", "-c", "sleep 60 & echo; wait"], {"LOCAL_RANK": "0"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as worker:
        worker.stdout.readline()
        asked = [pid for pid in supervise.workers() if os.getpgid(pid) == worker.pid]
        os.killpg(worker.pid, signal.SIGKILL)
    assert asked == [worker.pid]

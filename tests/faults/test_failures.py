"""A process of a run that fails: the others end soon, the exit code says so, and nothing is left running."""

import re
import signal
import time

import pytest

from dsframe.errors import TaskError
from tests.processes import deepspeed, forked, horovodrun, run_ranks, torchrun

LAUNCHERS = {
    "deepspeed": (deepspeed, "deepspeed"),
    "horovod": (horovodrun, "horovod"),
    "ddp": (torchrun, "ddp"),
}


EVERY = pytest.mark.parametrize("run", LAUNCHERS, indirect=True)
"""What each launcher learns in a way of its own: a rank that raises, is killed, a signal, and its own end by SIGKILL.

The rest is tried under DeepSpeed's alone, and some of it by `make test-all`. A rank that sleeps is seen by dsframe/guard and
ends with an exit code, as one that raises does. INT differs from TERM before the launcher, in
dsframe/host/supervise.py (tests/unit/test_launch_commands.py), the same for deepspeed and horovodrun; torchrun has one handler
for both.
"""
LONG = pytest.mark.long


@pytest.fixture
def run(request, tmp_path):
    """Trains the broken task on two ranks, under the launcher and on the engine that belong together.

    Ranks are started as users start them where something is done to them or to the launcher, and forked where not.
    """
    launch, engine = LAUNCHERS[request.param]

    def start(fault, during=None, *more):
        words = [
            *("-m", "dsframe.train", "--config", "zero1.json", "--engine", engine, "--run-dir", "run"),
            *("--set", "dsframe.steps=1000000", *more),
            *("--set", 'dsframe.task={"name": "tests.faults.broken_task:BrokenTask"}'),
        ]
        command = launch(2, words) if during else forked(launch, 2, words)
        return run_ranks(
            command,
            cwd=tmp_path,
            timeout_seconds=150,
            env={"FAULT": fault},
            settle_seconds=1.0,
            while_running=during,
        )

    return start


def after_ten_steps(running):
    running.wait_for(lambda: re.search(r"step +10/", running.output), timeout_seconds=90, what="ten steps were done")


@EVERY
def test_a_worker_that_raises(run):
    finished = run("raise")
    assert finished.returncode in (TaskError.exit_code, 1)  # horovodrun's and torchrun's own is 1
    assert "[rank 1] error: the task's code raised ValueError: a mistake of the task's own" in finished.output
    assert "called by dsframe/model/forward.py, line" in finished.output


@pytest.mark.parametrize("run", ["deepspeed", "ddp", pytest.param("horovod", marks=LONG)], indirect=True)
def test_a_mistake_of_all_workers_is_said_once_and_last(run, request):
    finished = run("all")
    assert finished.output.count("raised ValueError") == 1, str(finished)
    if "horovod" not in request.node.name:  # whose launcher has words of its own
        assert finished.output.rstrip().endswith("--verbose prints the whole traceback [task]")
        assert finished.returncode == TaskError.exit_code


@pytest.mark.parametrize(
    "run", ["deepspeed", pytest.param("horovod", marks=LONG), pytest.param("ddp", marks=LONG)], indirect=True
)
def test_a_rank_that_sleeps_is_named(run, request):
    finished = run("sleep", None, "--set", "dsframe.hang_timeout_seconds=4")
    assert finished.returncode != 0
    assert "dsframe: error: the run hangs in step 5: no progress for" in finished.output
    assert re.search(r"rank 0 waits in [\w ]+, called by \w+, ", finished.output)
    asleep = "IS MISSING there: it is in loss, broken_task.py:"
    assert re.search(rf"rank 1 {asleep}\d+: time\.sleep\(1000\)", finished.output)
    assert finished.output.count("IS MISSING") == 1
    if "horovod" not in request.node.name:  # torch's flight recorder, of Gloo here: Horovod has collectives of its own
        where = r"collectives of process group \S+ \S+: rank 0 waits in number (\d+), gloo:(?:all_)?reduce of \[\[\d.*\]\]; "
        both = re.search(rf"{where}rank 1 has done number (\d+), gloo:", finished.output)
        assert both, finished
        assert int(both[1]) > int(both[2])
    stacks = finished.output[finished.output.index("--- rank ") :]
    assert stacks.count("thread MainThread:") == 2  # every rank's, once


@pytest.mark.parametrize(
    ("run", "rank"),
    [pytest.param("deepspeed", 0, marks=LONG), ("deepspeed", 1), ("horovod", 0), ("ddp", 0)],
    indirect=["run"],
)
def test_a_killed_worker_ends_all(run, rank):
    killed = []

    def kill(running):
        after_ten_steps(running)
        running.ranks()[rank].kill()
        killed.append(time.monotonic())

    finished = run("none", kill)
    ended = time.monotonic()
    assert finished.returncode != 0
    assert ended - killed[0] < 15
    assert "frame #" not in finished.output, "torch's C++ frames of a lost connection"


@pytest.mark.parametrize(
    ("run", "number"),
    [
        ("deepspeed", signal.SIGTERM),
        pytest.param("deepspeed", signal.SIGINT, marks=LONG),
        ("horovod", signal.SIGTERM),
        ("ddp", signal.SIGTERM),
    ],
    indirect=["run"],
)
def test_a_signal_to_the_launcher_ends_all(run, number):
    sent = []

    def send(running):
        after_ten_steps(running)
        running.process.send_signal(number)
        sent.append(time.monotonic())

    finished = run("none", send)
    assert finished.returncode != 0
    assert time.monotonic() - sent[0] < 15


@EVERY
def test_a_killed_launcher_ends_all(run):
    def kill(running):
        after_ten_steps(running)
        running.process.kill()
        running.wait_for_end(timeout_seconds=15)

    run("none", kill)

"""Signals, in a process of their own: the step ends first, a second one does not wait, and nobody waits for ever."""

import os
import signal
import time

import pytest

from dsframe.guard.signals import StopRequest
from dsframe.host.processes import STOP_SIGNALS
from tests.processes import ready_programs
from tests.threads import Room

ECHO_SECONDS = 0.5
PROGRAM = """
import sys, time
from types import SimpleNamespace
import torch
from dsframe.guard import signals
signals.GRACE_SECONDS, signals.ECHO_SECONDS = float(sys.argv[1]), float(sys.argv[4])
plan = SimpleNamespace(world=SimpleNamespace(size=1, rank=0), device=torch.device("cpu"))
ranks = SimpleNamespace(plan=plan, sum_over_ranks=lambda values: values)
with signals.StopRequest(ranks, 10) as stop:
    print("ready", flush=True)
    if len(sys.argv) > 5:
        with stop.saving():
            time.sleep(float(sys.argv[5]))
    for step in range(11, 100_000):
        time.sleep(float(sys.argv[2]))          # one step
        if stop.agreed(step):
            print("stopped by", stop.name, flush=True)
            break
print("left", flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def start():
    with ready_programs() as begin:
        yield lambda grace, step, after=0.0, saving=0.0: begin("-c", PROGRAM, grace, step, after, ECHO_SECONDS, saving)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_step_ends_and_the_run_stops(start, number):
    process = start(60, 0.01)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert out == f"stopped by {number.name}\nleft\n"
    assert process.returncode == 0


def test_nohup_outlives_the_terminal(start):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(60, 0.01)
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "stopped by SIGTERM\nleft\n"


def test_a_save_under_way_is_not_cut_short(start):
    """It takes longer than a rank may take to its next step; that time begins when it is over."""
    process = start(2.0, 0.1, saving=4.5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "stopped by SIGTERM\nleft\n", "")


def test_the_same_signal_passed_on_by_a_launcher_is_one(start):
    process = start(60, 0.3)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "stopped by SIGTERM\nleft\n"


def test_a_second_signal_leaves_at_once(start):
    process = start(60, 60)
    process.send_signal(signal.SIGTERM)
    time.sleep(2 * ECHO_SECONDS)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (143, "")
    assert err == "dsframe: warning: a second signal: leaving without saving\n"


def test_a_step_that_never_ends_does_not_hold_the_process(start):
    process = start(0.5, 60)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "no step ended within" in err


def test_a_warning_waits_for_a_step_that_is_longer(start):
    process = start(0.5, 2.0)
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=20)[0] == "stopped by SIGUSR1\nleft\n"


def test_goodbyes_are_not_cut_short(start):
    process = start(60, 0.01, 1.0)
    process.send_signal(signal.SIGTERM)
    while process.stdout.readline() != "left\n":
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_ranks_ask_each_other_every_two_seconds_and_evaluations_do_not_count():
    def asks(ranks):
        request = StopRequest(ranks, 10)
        request._since -= 0.2 + 0.4 * ranks.plan.world.rank
        assert not request.agreed(14)  # 0.1 s a step
        kept = request._asked_at, request._next
        with request.between_batches():
            assert (request._asked_at, request._next) == (0, 1)
            time.sleep(0.1)
        assert (request._asked_at, request._next) == kept
        assert time.perf_counter() - request._since < 0.1
        return kept

    ((asked, following), other) = Room(2).run(asks)
    assert (asked, following) == other
    assert asked == 14
    assert 14 + 17 < following <= 14 + 20


def test_what_was_there_is_there_again():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopRequest(None, 0) as request:
        request._saving = True
        with request.saving():
            pass
        assert request._saving
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_program_with_many_open_files_hears_a_signal():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    many = [os.dup(1) for _ in range(1024)]
    try:
        with StopRequest(None, 0) as request:
            signal.raise_signal(signal.SIGUSR1)
            until = time.monotonic() + 10
            while request._received is None and time.monotonic() < until:
                time.sleep(0.01)
        assert request._received == signal.SIGUSR1
    finally:
        for one in many:
            os.close(one)
        for number, handler in before.items():
            signal.signal(number, handler)

"""Processes that read a data set: they outlive the signals that ask a training to stop, and never their own parent."""

import gc
import os
import signal
import sys
import time

import psutil
import pytest
import torch

from dsframe.data import Loader, as_source
from dsframe.data.workers import held
from dsframe.host.processes import STOP_SIGNALS
from tests.processes import ready_programs, run_program

PROGRAM = """
import multiprocessing, os, signal, sys, time
from dsframe.data import Loader

class Reading:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(float(sys.argv[2]))
        return float(index), index

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver" if sys.argv[1] == "forkserver" else "fork")
    stream = Loader(Reading(), seed=0, micro_batch_size=2, workers=2).stream()
    next(stream)
    for number in map(int, sys.argv[3:]):
        signal.signal(number, lambda *_: os.write(1, b"asked\\n"))  # a print may still be under way
    print("ready", flush=True)
    if sys.argv[1] == "raise":
        raise RuntimeError("while workers read")  # the traceback keeps the stream until Python ends
    for line in sys.stdin:
        print(next(stream)[1].tolist(), flush=True)
"""


@pytest.fixture
def start():
    numbers = [int(number) for number in STOP_SIGNALS]
    with ready_programs() as begin:
        yield lambda what, seconds=0.0, program=("-c", PROGRAM): begin(*program, what, seconds, *numbers)


def reads_to_the_end(process, said_first):
    for index in range(12):  # more than workers have read ahead
        # A line first: where the signal arrives just before the read of standard input, Python's handler waits for its end.
        process.stdin.write("next\n")
        process.stdin.flush()
        assert index > 0 or [process.stdout.readline() for _ in said_first] == said_first
        assert process.stdout.readline().startswith("["), "a rank without its workers"
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_a_start_of_workers_leaves_collection_and_signals_as_they_were():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    for change, collects in ((gc.disable, False), (gc.enable, True)):
        change()
        with held():
            pass
        assert gc.isenabled() == collects
    assert {*STOP_SIGNALS} <= signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_workers_collect():
    source = as_source([0], 0, lambda rows: (torch.tensor([gc.isenabled()]), torch.zeros(1)))
    assert next(Loader(source, seed=0, micro_batch_size=1, workers=1).stream())[0].all()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_a_signal_to_all(start, number):
    process = start("read")
    os.killpg(process.pid, number)
    reads_to_the_end(process, ["asked\n"])


def test_workers_of_a_fork_server_stay(start, tmp_path):
    """What is above them is not their parent: they looked after a second, and left."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = start("forkserver", 0.0, (str(program),))
    time.sleep(2.5)
    reads_to_the_end(process, [])


def test_a_parent_ends_its_workers_whatever_they_do(start):
    # Python itself ends them, by SIGTERM, and then waits for them without a limit.
    process = start("raise", 1.0)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "RuntimeError: while workers read" in err
    assert "DataLoader worker" not in err


def test_a_killed_parent_leaves_no_worker(start):
    process = start("read", 1.0)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.kill()
    process.wait()
    limit = time.monotonic() + 20
    while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        assert time.monotonic() < limit
        time.sleep(0.1)


TAKING = """
import multiprocessing, socket, sys, time
from multiprocessing import reduction, resource_sharer
from dsframe.data.workers import outlive_signals

def worker(pipe):
    outlive_signals(0)
    reduction.DupFd(0)  # starts the thread that hands over tensors
    pipe.send(resource_sharer._resource_sharer._address)
    pipe.recv()

if __name__ == "__main__":
    pipe, end = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=worker, args=(end,))
    process.start()
    with socket.socket(socket.AF_UNIX) as taker:
        taker.connect(pipe.recv())
    time.sleep(0.3)
    pipe.send("end")
    process.join()
"""


def test_a_training_that_ends_while_it_takes_a_tensor_leaves_no_traceback():
    finished = run_program([sys.executable, "-c", TAKING])
    assert not finished.stderr


GARBAGE = """
import gc, os
from dsframe.data import Loader

class Group:
    def __del__(self):
        if os.getpid() != parent:
            os._exit(3)
        gone.append(self)

class Reading:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        gc.collect()
        return float(index), index

parent = os.getpid()
gc.disable()
gc.freeze()
gone = []
group = Group()
group.itself = group
del group
print(next(Loader(Reading(), seed=0, micro_batch_size=8, workers=1).stream())[1].sum().item(), len(gone))
gc.collect()
print(len(gone))
"""


def test_a_worker_does_not_collect_what_its_parent_has_left():
    """Of an earlier DDP run of the program that was a process group, whose threads the worker waited for, or which aborted."""
    finished = run_program([sys.executable, "-c", GARBAGE], check=False)
    assert (finished.returncode, finished.stdout) == (0, "28 0\n1\n"), finished.stderr

"""The watchdog's words, and its judgement: who is missing, and that slow is not stuck. Processes: tests/faults."""

import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsframe.cluster.world import World
from dsframe.errors import TaskError
from dsframe.guard import hang, watchdog
from dsframe.guard.hang import RankStatus, diagnose, last_collectives
from dsframe.run_dir import outcome
from tests.processes import REPOSITORY, run_program

WAITING = RankStatus(4, 5, 30.0, "all_reduce", "backward, model.py:7: loss.backward()", "thread MainThread:\n  a")
ASLEEP = RankStatus(3, 5, 20.0, "", "loss, task.py:9: time.sleep(99)", "thread MainThread:\n  b")


def test_the_one_that_is_missing_is_named():
    lines = diagnose({0: WAITING, 1: ASLEEP, 2: WAITING}, 3, 20.0).splitlines()
    assert lines[:4] == [
        "dsframe: error: the run hangs in step 5: no progress for 30 s (dsframe.hang_timeout_seconds is 20) [hang]",
        "  rank 0 waits in all_reduce, called by backward, model.py:7: loss.backward()",
        "  rank 1 IS MISSING there: it is in loss, task.py:9: time.sleep(99)",
        "  rank 2 waits in all_reduce, called by backward, model.py:7: loss.backward()",
    ]
    assert lines[4:] == ["--- rank 0, 2", "thread MainThread:", "  a", "--- rank 1", "thread MainThread:", "  b"]


def test_who_does_not_answer_and_who_is_behind_is_named():
    text = diagnose({0: WAITING, 2: replace(WAITING, beats=3, collective="barrier")}, 3, 20.0)
    assert "rank 1 DOES NOT ANSWER: its process has ended or is stopped" in text
    assert "rank 2 waits in barrier, but is 2 micro-batch(es) behind" in text
    assert "MISSING" not in diagnose({0: ASLEEP}, 1, 20.0)
    assert "rank 0 IS MISSING" in diagnose({0: ASLEEP}, 2, 20.0)


def test_who_waits_on_its_device_is_seen_by_what_it_has_called():
    """As NCCL's ranks hang: they call collectives and go on, until they need a number from the device."""
    reads = replace(ASLEEP, place="_log, trainer.py:3: float(loss)")
    waits = replace(
        reads, calls={"0 default_pg": [57, "nccl:all_reduce", "[[8, 4]]", False], "1 mesh": [3, "a", "", True]}
    )
    sleeps = replace(ASLEEP, calls={"0 default_pg": [56, "nccl:broadcast", "[[2]]", True]})
    assert diagnose({0: waits, 1: sleeps}, 2, 20.0).splitlines()[1:5] == [
        "  rank 0 waits in nccl:all_reduce of [[8, 4]], which its device has not done, called by _log, trainer.py:3: float(loss)",
        "  rank 1 IS MISSING there: it is in loss, task.py:9: time.sleep(99)",
        "  collectives of process group 0 default_pg: rank 0 waits in number 57, nccl:all_reduce of [[8, 4]]; "
        "rank 1 has done number 56, nccl:broadcast of [[2]]",
        "--- rank 0, 1",
    ]
    assert "collectives of process group 0" in diagnose({0: waits, 1: waits}, 2, 20.0), "and nobody has done it"


def test_the_first_collective_that_is_not_done_is_told(monkeypatch):
    def entry(number, done, *, p2p=False, group="0"):
        more = {"process_group": [group, "default_pg"], "is_p2p": p2p, "retired": done, "input_sizes": [[number]]}
        return {"collective_seq_id": number, "profiling_name": "nccl:all_reduce", **more}

    entries = [entry(9, False, p2p=True), entry(1, True), entry(2, False), entry(3, False), entry(5, True, group="1")]
    dump = lambda: json.dumps({"entries": entries}).encode()  # noqa: E731
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    # Gloo's recorder still has what earlier tests of this process called.
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: b"{}", raising=False)
    assert last_collectives() == {
        "0 default_pg": (2, "nccl:all_reduce", "[[2]]", False),
        "1 default_pg": (5, "nccl:all_reduce", "[[5]]", True),
    }


def test_the_collective_and_its_caller_are_told_behind_what_lies_between():
    calls = [lambda: hang.waits_in(sys._getframe(1))]
    for name, file in (
        ("wait", "torch/distributed/distributed_c10d.py"),
        ("decorate_context", "torch/utils/_contextlib.py"),
        ("all_reduce", "deepspeed/comm/comm.py"),
        ("log", "deepspeed/utils/logging.py"),
        ("loss", "home/task.py"),
    ):
        exec(compile(f"def {name}():\n    return call()", f"/site/{file}", "exec"), scope := {"call": calls[-1]})
        calls.append(scope[name])
    assert calls[-1]() == ("all_reduce", "loss, task.py:2: ")


def test_stacks_are_the_main_threads_first_and_none_of_a_watcher():
    over = threading.Event()
    for name in ("a reader", hang.WATCHERS):
        threading.Thread(target=over.wait, name=name).start()
    with ThreadPoolExecutor(1) as pool:
        stacks = pool.submit(hang.standing, 1, 1, 0.0, {}).result().stacks
    over.set()
    assert re.findall("^thread (MainThread|a reader|dsframe.*):", stacks, re.MULTILINE) == ["MainThread", "a reader"]


PROGRAM = """
import sys, time, threading
from types import SimpleNamespace
import torch
from dsframe.guard import watchdog
from dsframe.guard.watchdog import Watchdog
seconds, rounds, watchdog.FIRST_FACTOR = 0.4, int(sys.argv[1]), 2.0
with Watchdog(SimpleNamespace(size=1, rank=0, is_main=True), seconds) as watch:
    watch.begin(0)
    time.sleep(0.6)                     # the first step: compiling
    watch.done(1)
    for _ in range(rounds):
        time.sleep(0.1)
        watch.beat()
    if rounds < 10:
        time.sleep(20)
print("done")
"""


def test_slow_is_not_stuck_and_stuck_ends_with_9():
    def run(rounds):
        command = [sys.executable, "-c", PROGRAM, rounds]
        return run_program(command, cwd=REPOSITORY, check=False)

    slow = run("12")
    assert (slow.returncode, slow.stdout, slow.stderr) == (0, "done\n", "")
    stuck = run("3")
    assert (stuck.returncode, stuck.stdout) == (9, "")
    assert "the run hangs in step 2: no progress for" in stuck.stderr
    assert "rank 0 is in <module>, <string>:" in stuck.stderr


def test_a_rank_that_is_asked_answers():
    """Another rank has called in the store: this one is to compare, whatever its own limit."""
    dog = watchdog.Watchdog(World(), 0.2)
    dog._store = SimpleNamespace(check=lambda keys: keys == [f"hang/{dog._round}"])
    hears = threading.Thread(target=dog._poll_calls, daemon=True)
    hears.start()
    until = time.monotonic() + 10
    while dog._called < dog._round and time.monotonic() < until:
        time.sleep(0.01)
    dog._over.set()
    hears.join()
    assert dog._called >= dog._round


def test_only_the_first_step_may_take_longer():
    dog = watchdog.Watchdog(World(), 4.0)
    assert dog._limit == watchdog.SETUP_SECONDS
    dog.begin(7)
    assert dog._limit == 4.0 * watchdog.FIRST_FACTOR
    dog.done(8)
    assert dog._limit == 4.0


def test_time_counts_from_the_last_sign_of_life():
    dog = watchdog.Watchdog(World(), 4.0)
    for sign in (dog.alive, dog.beat, lambda: dog.begin(7), dog.__enter__):
        dog._last = 0.0
        sign()
        assert dog._last > 0
    dog.__exit__(None, None, None)
    with dog:
        assert not dog._over.is_set(), "it watches again"


@pytest.mark.parametrize(("idle", "codes"), [((9.0, 5.0), [9, 9]), ((9.0, 3.0), []), ((9.0, None), [9, 9])])
def test_ranks_end_together_unless_one_goes_on(idle, codes, monkeypatch):
    """Rank 0 judges when the other has asked; if it cannot, it is a hang."""
    store, ended = torch.distributed.HashStore(), []
    monkeypatch.setattr(watchdog, "_create_store", lambda world: store)
    monkeypatch.setattr("os._exit", ended.append)

    def report(rank):
        dog = watchdog.Watchdog(World(rank, 2, rank, 2), 8.0)
        dog.done(3)
        dog._report(replace(ASLEEP, seconds=idle[rank]))

    other = threading.Thread(target=report, args=[1])
    other.start()
    time.sleep(0.3)
    assert store.check(["hang/0"]), "it asks rank 0"
    report(0)
    other.join()
    assert ended == codes


def test_a_rank_that_a_library_throws_out_says_which_calls_differ():
    dog = watchdog.Watchdog(World(), 0.0)
    dog._store, dog._calls = True, SimpleNamespace(difference=lambda *_: "rank 1 called another")
    for said, raised, words in (
        ("Mismatch in a collective", TaskError, "rank 1"),
        ("no room", RuntimeError, "no room"),
    ):
        with pytest.raises(raised, match=words), dog:
            raise RuntimeError(said)


STOPPED = """
import json, os, sys, threading, time
from types import SimpleNamespace
from dsframe.guard import watchdog
from dsframe.run_dir import outcome
watchdog.ANSWER_SECONDS, watchdog.FIRST_FACTOR = 0.3, 1.0
blocks = lambda *_: threading.Event().wait()
store = SimpleNamespace(check=blocks, set=blocks, get=blocks)
watchdog._create_store = lambda world: store
if sys.argv[1] == "pipe":
    os.close(2)
outcome.start(sys.argv[2], 1)
with watchdog.Watchdog(SimpleNamespace(size=2, rank=1, is_main=False), 0.4) as watch:
    watch.begin(0)
    time.sleep(30)
"""


@pytest.mark.parametrize("stderr", ["open", "pipe"])
def test_a_rank_0_that_is_stopped_is_reported_and_the_launcher_hears_of_it(stderr, tmp_path):
    """Its store answers nothing, for ever; and the report is left where standard error is gone, too."""
    report = tmp_path / "outcome.jsonl"
    command = [sys.executable, "-c", STOPPED, stderr, str(report)]
    ended = run_program(command, cwd=REPOSITORY, check=False)
    assert ended.returncode == 9
    assert ended.stderr.startswith("[rank 1] rank 0 does not answer\n" if stderr == "open" else "")
    assert (outcome.read(report).code, outcome.read(report).rank) == (9, 1)
    assert outcome.read(report).message.startswith("the run hangs in step 1")


def test_a_process_that_was_frozen_does_not_hang(monkeypatch):
    """Ctrl-Z, a paused container, a suspended host: nobody, the watchdog neither, has run for an hour."""
    now = [1000.0]
    told = []
    naps = iter([1.0, 3600.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0])

    def wait(seconds):
        now[0] += (nap := next(naps, 0.0))
        return not nap

    own = watchdog.Watchdog(World(), 8.0)
    monkeypatch.setattr(own, "_over", SimpleNamespace(wait=wait))
    own._last, own._limit = now[0], 8.0
    monkeypatch.setattr("dsframe.guard.watchdog.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(own, "_report", lambda status: told.append(status.seconds))
    looked = own._calls = []
    monkeypatch.setattr(own, "_end_if_different", lambda: looked.append(now[0]))
    own._watch()
    assert told == [10.0]  # since it went on
    assert len(looked) > own._round == 1, "calls are compared earlier"

"""The watchdog's words, and its judgement: who is missing, and that slow is not stuck. Processes: tests/faults."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import FrameType

from dsframe.report.hang import Standing, diagnose, waits_in
from tests.processes import REPOSITORY

WAITING = Standing(4, 5, 30.0, "all_reduce", "backward, model.py:7: loss.backward()", "thread MainThread:\n  a")
ASLEEP = Standing(4, 5, 30.0, "", "loss, task.py:9: time.sleep(99)", "thread MainThread:\n  b")


def test_the_one_that_is_missing_is_named() -> None:
    lines = diagnose({0: WAITING, 1: ASLEEP, 2: WAITING}, 3, 20.0).splitlines()
    assert lines[:4] == [
        "dsframe: the run hangs in step 5: nothing has happened for 30 s (dsframe.hang_timeout_seconds is 20)",
        "  rank 0 waits in all_reduce, called by backward, model.py:7: loss.backward()",
        "  rank 1 IS MISSING there: it is in loss, task.py:9: time.sleep(99)",
        "  rank 2 waits in all_reduce, called by backward, model.py:7: loss.backward()",
    ]
    assert lines[4:] == ["--- rank 0, 2", "thread MainThread:", "  a", "--- rank 1", "thread MainThread:", "  b"]


def test_who_does_not_answer_and_who_is_behind_is_named() -> None:
    text = diagnose({0: WAITING, 2: replace(WAITING, beats=3, collective="barrier")}, 3, 20.0)
    assert "rank 1 DOES NOT ANSWER: its process has ended or is stopped" in text
    assert "rank 2 waits in barrier, but is 2 micro-batch(es) behind" in text
    assert "MISSING" not in diagnose({0: ASLEEP}, 1, 20.0)


def test_a_collective_is_found_under_its_wrappers() -> None:
    def frames(*calls: tuple[str, str]) -> FrameType:
        """A stack of functions of these names in these files, outermost first."""
        space: dict[str, object] = {"sys": sys, "inner": lambda: sys._getframe(1)}
        for name, file in reversed(calls):
            exec(compile(f"def {name}(inner=inner):\n    return inner()", file, "exec"), space)
            space["inner"] = space[name]
        found: FrameType = space["inner"]()  # type: ignore[operator]
        return found

    torchs, deepspeeds = "/v/torch/distributed/", "/v/deepspeed/comm/"
    stack = [("step", "/me/train.py"), ("all_reduce", f"{deepspeeds}comm.py"), ("fn", "/v/torch/_dynamo/eval_frame.py")]
    stack += [("wrapper", f"{torchs}c10d_logger.py"), ("barrier", f"{torchs}distributed_c10d.py")]
    assert waits_in(frames(*stack)) == ("all_reduce", "step, train.py:2: ")
    horovods = [("update", "/me/train.py"), ("synchronize", "/v/horovod/torch/mpi_ops.py")]
    assert waits_in(frames(*horovods)) == ("synchronize", "update, train.py:2: ")
    assert waits_in(frames(("loss", "/me/task.py"))) == ("", "loss, task.py:2: ")
    backward = [("step", "/me/train.py"), ("_engine_run_backward", "/v/torch/autograd/graph.py")]
    assert waits_in(frames(*backward)) == ("the backward pass", "step, train.py:2: ")


PROGRAM = """
import sys, time, threading
from types import SimpleNamespace
import torch
from dsframe.report import watchdog
from dsframe.report.watchdog import Watchdog
seconds, rounds, watchdog.FIRST_FACTOR = 0.4, int(sys.argv[1]), 2.0
plan = SimpleNamespace(world=SimpleNamespace(size=1, rank=0, is_main=True), device=torch.device("cpu"))
with Watchdog(SimpleNamespace(plan=plan, sum_over_ranks=lambda values: values), seconds) as watch:
    time.sleep(0.6)                     # the first step: compiling
    watch.done(1)
    for _ in range(rounds):
        time.sleep(0.1)
        watch.beat()
    if rounds < 10:
        time.sleep(20)
print("done")
"""


def test_slow_is_not_stuck_and_stuck_ends_with_9() -> None:
    def run(rounds: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, rounds]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False)

    slow = run("12")
    assert (slow.returncode, slow.stdout, slow.stderr) == (0, "done\n", "")
    stuck = run("3")
    assert (stuck.returncode, stuck.stdout) == (9, "")
    assert "the run hangs in step 2: nothing has happened for" in stuck.stderr
    assert "rank 0 is in <module>, <string>:" in stuck.stderr

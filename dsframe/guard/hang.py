"""The report on a hang: where each rank is, which ranks wait, which is missing. Plain data in, plain text out."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_COMMUNICATION = ("torch/distributed/", "deepspeed/comm/", "horovod/")
"""Folders whose functions wait for other ranks. DDP's own Python is not among them: it waits inside the backward pass."""
_BETWEEN = (
    "torch/_dynamo/",
    "torch/utils/_contextlib",
    "torch/nn/modules/module",
    "deepspeed/utils/",
    "deepspeed/runtime/compiler",
)
_NAMELESS = {"wrapper", "log_wrapper", "decorate_context", "fn", "_fn", "inner", "func", "<lambda>", "wait"}
WATCHERS = "dsframe-watchdog"
"""Prefix of the names of the watchdog's own threads."""
_BACKWARD = "_engine_run_backward"
SET_UP = -1
"""Stands for the number of steps before training."""


@dataclass(frozen=True)
class RankStatus:
    """Position of one rank."""

    step: int
    """Steps done, or SET_UP."""
    beats: int
    """Signs of life so far: micro-batches taken, evaluation batches, parameters saved."""
    seconds: float
    """Since the last one."""
    collective: str
    """The collective that it waits in, such as ``all_reduce``; "" if it waits for nobody."""
    place: str
    """Its own innermost line, or the one that called the collective: ``loss, model.py:12: return f(x)``."""
    stacks: str
    """Python's stack of every thread but the watchdog's own, innermost last."""


def standing(step: int, beats: int, seconds: float) -> RankStatus:
    """Returns where this process's main thread is at this moment; to be called from another thread."""
    frames = sys._current_frames()
    main = frames[threading.main_thread().ident or 0]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sorted(frames.items(), key=lambda item: item[1] is not main)
        if ident != threading.get_ident() and not names.get(ident, "").startswith(WATCHERS)
    ]
    collective, place = waits_in(main)
    return RankStatus(step, beats, seconds, collective, place, "\n".join(texts))


def moment(step: int) -> str:
    """Describes the moment after ``step`` steps."""
    return "before its first step, while it is set up" if step == SET_UP else f"in step {step + 1}"


def waits_in(frame: FrameType) -> tuple[str, str]:
    """The collective in which a stack ends, "" where it ends in none, and the place that called it (else its innermost one)."""
    stack = traceback.extract_stack(frame)
    caller, name = len(stack) - 1, ""
    # On CPUs the backward pass runs in C++ from here, and gradients are exchanged in it.
    if stack[caller].name == _BACKWARD:
        name = "the backward pass"
        while caller and "/torch/" in stack[caller].filename.replace("\\", "/"):
            caller -= 1
    elif _in(stack[caller].filename, _COMMUNICATION):
        while caller and _in(stack[caller].filename, _COMMUNICATION + _BETWEEN):
            if _in(stack[caller].filename, _COMMUNICATION) and stack[caller].name not in _NAMELESS:
                name = stack[caller].name
            caller -= 1
        name = name or "a collective"
    own = stack[caller]
    return name, f"{own.name}, {Path(own.filename).name}:{own.lineno}: {(own.line or '').strip()}"


def _in(filename: str, folders: Sequence[str]) -> bool:
    return any(f"/{folder}" in filename.replace("\\", "/") for folder in folders)


def diagnose(found: Mapping[int, RankStatus], ranks: int, limit_seconds: float) -> str:
    """The report: a line about each rank, then the stacks, equal ones once. ``found``: by rank, those that answered."""
    absent = [rank for rank in range(ranks) if rank not in found]
    some_wait = any(one.collective for one in found.values())
    furthest = max((one.beats for one in found.values()), default=0)
    lines = []
    for rank, one in sorted(found.items()):
        if one.collective and one.beats == furthest:
            what = f"waits in {one.collective}, called by {one.place}"
        elif one.collective:
            what = f"waits in {one.collective}, but is {furthest - one.beats} micro-batch(es) behind, called by {one.place}"
        elif some_wait or absent:
            what = f"IS MISSING there: it is in {one.place}"
        else:
            what = f"is in {one.place}"
        lines.append(f"  rank {rank} {what}")
    why = "its process has ended or is stopped, or C code holds Python's lock"
    lines += [f"  rank {rank} DOES NOT ANSWER: {why}" for rank in absent]
    step = max((one.step for one in found.values()), default=SET_UP)
    idle = max((one.seconds for one in found.values()), default=0.0)
    limit = "the limit is" if step == SET_UP else "dsframe.hang_timeout_seconds is"
    head = f"dsframe: error: the run hangs {moment(step)}: no progress for {idle:,.0f} s ({limit} {limit_seconds:g}) [hang]"
    same: dict[str, list[int]] = {}
    for rank, one in sorted(found.items()):
        same.setdefault(one.stacks, []).append(rank)
    stacks = [f"--- rank {', '.join(map(str, who))}\n{text}" for text, who in same.items()]
    return "\n".join([head, *lines, *stacks])

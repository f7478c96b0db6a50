"""Builds the report on a hang, as text: where each rank is, which ranks wait, which is missing."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_COMMUNICATION = ("torch/distributed/", "deepspeed/comm/", "horovod/")
"""Folders whose functions wait for other ranks. DDP is not included: it waits inside the backward pass."""
_BETWEEN = (
    "torch/_dynamo/",
    "torch/utils/_contextlib",
    "torch/nn/modules/module",
    "deepspeed/utils/",
    "deepspeed/runtime/compiler",
)
_NAMELESS = {"wrapper", "log_wrapper", "decorate_context", "fn", "_fn", "inner", "func", "<lambda>", "wait"}
WATCHERS = "dsframe-watchdog"
"""Prefix of the watchdog's thread names."""
_BACKWARD = "_engine_run_backward"
SET_UP = -1
"""Replaces the number of steps before training."""


Call = Sequence[Any]
"""Sequence number in its process group, name, sizes and completion of a collective."""


@dataclass(frozen=True)
class RankStatus:
    """State of one rank when the hang was detected."""

    step: int
    """Completed steps, or SET_UP."""
    beats: int
    """Signs of life so far: micro-batches taken, evaluation batches, parameters saved."""
    seconds: float
    """Seconds since the last sign of life."""
    collective: str
    """The collective that it waits in, such as ``all_reduce``; "" if none."""
    place: str
    """Its innermost line, or the line that called the collective: ``loss, model.py:12: return f(x)``."""
    stacks: str
    """Python stack of every thread except the watchdog's, innermost frame last."""
    calls: Mapping[str, Call] = field(default_factory=dict)
    """Last collective of each process group (:func:`last_collectives`)."""

    @property
    def waits_for(self) -> str:
        """The collective that the stack waits in, else one that the device has not completed; "" if there is none."""
        pending = (
            f"{name} of {sizes}, which its device has not done"
            for _, name, sizes, done in self.calls.values()
            if not done
        )
        return self.collective or next(pending, "")


def standing(step: int, beats: int, seconds: float, calls: Mapping[str, Call]) -> RankStatus:
    """Returns where this process's main thread is. Called from another thread."""
    frames = sys._current_frames()
    main = frames[threading.main_thread().ident or 0]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sorted(frames.items(), key=lambda item: item[1] is not main)
        if ident != threading.get_ident() and not names.get(ident, "").startswith(WATCHERS)
    ]
    collective, called_from = waits_in(main)
    return RankStatus(step, beats, seconds, collective, called_from, "\n".join(texts), calls)


def last_collectives() -> dict[str, Call]:
    """Returns the first incomplete collective of each process group, or else its last one, from torch's flight
    recorder. On GPUs a rank continues after calling a collective: the device waits, and the stack does not show it."""
    core: Any = torch._C._distributed_c10d
    dumps = (getattr(core, f"_dump_{backend}_trace_json", None) for backend in ("nccl", "fr"))  # the second is for Gloo
    last_calls: dict[str, Call] = {}
    for entry in (entry for dump in dumps if dump for entry in json.loads(dump()).get("entries", [])):
        group = " ".join(entry["process_group"])
        if not entry["is_p2p"] and (group not in last_calls or last_calls[group][3]):
            name, sizes = entry["profiling_name"], json.dumps(entry["input_sizes"])
            last_calls[group] = (entry["collective_seq_id"], name, sizes, bool(entry["retired"]))
    return last_calls


def moment(step: int) -> str:
    """Describes the moment after ``step`` steps."""
    return "before its first step, while it is set up" if step == SET_UP else f"in step {step + 1}"


def waits_in(frame: FrameType) -> tuple[str, str]:
    """Returns the collective that a stack ends in ("" if none), and the line that called it, or the last one."""
    stack = traceback.extract_stack(frame)
    caller, name = len(stack) - 1, ""
    # On CPUs the backward pass, including the exchange of gradients, runs in C++ below this frame.
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
    called_from = stack[caller]
    return (
        name,
        f"{called_from.name}, {Path(called_from.filename).name}:{called_from.lineno}: {(called_from.line or '').strip()}",
    )


def _in(filename: str, folders: Sequence[str]) -> bool:
    return any(f"/{folder}" in filename.replace("\\", "/") for folder in folders)


def diagnose(statuses: Mapping[int, RankStatus], ranks: int, limit_seconds: float) -> str:
    """Returns the report: a line for each rank, then the distinct stacks. ``statuses``: of ranks that answered."""
    absent = [rank for rank in range(ranks) if rank not in statuses]
    some_wait = any(status.waits_for for status in statuses.values())
    furthest = max((status.beats for status in statuses.values()), default=0)
    lines = []
    for rank, status in sorted(statuses.items()):
        if status.waits_for and status.beats == furthest:
            what = f"waits in {status.waits_for}, called by {status.place}"
        elif status.waits_for:
            what = f"waits in {status.waits_for}, but is {furthest - status.beats} micro-batch(es) behind, called by {status.place}"
        elif some_wait or absent:
            what = f"IS MISSING there: it is in {status.place}"
        else:
            what = f"is in {status.place}"
        lines.append(f"  rank {rank} {what}")
    why = "its process has ended or is stopped, or C code holds Python's lock"
    lines += [f"  rank {rank} DOES NOT ANSWER: {why}" for rank in absent]
    lines += _collectives(statuses)
    step = max((status.step for status in statuses.values()), default=SET_UP)
    idle = max((status.seconds for status in statuses.values()), default=0.0)
    limit = "the limit is" if step == SET_UP else "dsframe.hang_timeout_seconds is"
    head = f"dsframe: error: the run hangs {moment(step)}: no progress for {idle:,.0f} s ({limit} {limit_seconds:g}) [hang]"
    same: dict[str, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        same.setdefault(status.stacks, []).append(rank)
    stacks = [f"--- rank {', '.join(map(str, who))}\n{text}" for text, who in same.items()]
    return "\n".join([head, *lines, *stacks])


def _collectives(statuses: Mapping[int, RankStatus]) -> Iterator[str]:
    """Yields a line for each process group with incomplete or different collectives."""
    for group in sorted({group for status in statuses.values() for group in status.calls}):
        calls = {rank: status.calls[group] for rank, status in sorted(statuses.items()) if group in status.calls}
        if len({json.dumps(call) for call in calls.values()}) > 1 or not all(call[3] for call in calls.values()):
            texts = (
                f"rank {rank} {'has done' if done else 'waits in'} number {number}, {name} of {sizes}"
                for rank, (number, name, sizes, done) in calls.items()
            )
            yield f"  collectives of process group {group}: {'; '.join(texts)}"

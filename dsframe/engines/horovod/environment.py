"""Horovod's environment variables, which it reads when it starts."""

from __future__ import annotations

import os

import torch

from dsframe.errors import EngineError

CPU_ROUND_MILLISECONDS = 5.0
"""Default time between two rounds of reductions on CPUs. An empty round takes 0.12 ms of a core; a bucket waits half
the interval on average."""
THRESHOLD, ROUNDS, TUNES = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_AUTOTUNE"
APART = "HOROVOD_DISABLE_GROUP_FUSION"
"""Reduces buckets that are ready in the same round one by one. Fused, the position of a number in the message would
depend on timing, and from three ranks on the order in which the ranks' values are added: no two runs would be equal."""
ASYNC_COMPLETION = "HOROVOD_ENABLE_ASYNC_COMPLETION"

_READ_ONCE = (ROUNDS, APART, "HOROVOD_TIMELINE")
_started: dict[str, str | None] = {}
"""Values that Horovod read when it started."""


def settle_environment(device: torch.device) -> float | None:
    """Sets unset variables before Horovod starts. Returns the bucket size in bytes if the environment sets it.

    Raises EngineError if the environment asks for autotuning, which changes during training what is reduced together.
    """
    if os.environ.get(TUNES, "0") not in ("", "0"):
        raise EngineError(
            f"{TUNES}: dsframe cuts the buckets itself, so there is nothing to tune; leave out horovodrun's --autotune"
        )
    os.environ.setdefault(APART, "1")
    # Horovod does not fuse buckets. Its second start in a process crashes if this and the cycle time are both fixed
    # (SIGSEGV in ParameterManager::BayesianParameter::SetValue, 0.28.1).
    bucket_bytes = _number(THRESHOLD)
    os.environ.pop(THRESHOLD, None)
    if _number(ROUNDS) is None and device.type == "cpu":
        os.environ[ROUNDS] = str(CPU_ROUND_MILLISECONDS)
    if device.type == "cuda":  # the host then does not wait for each bucket
        os.environ.setdefault(ASYNC_COMPLETION, "1")
    return bucket_bytes


def _number(name: str) -> float | None:
    """Returns a number of the environment; None if unset. Raises EngineError if it is not a number."""
    given = os.environ.get(name)
    try:
        return float(given) if given else None
    except ValueError:
        raise EngineError(f"{name}={given!r} is not a number") from None


def note_start(*, running: bool) -> None:
    """Called right before a start. Raises EngineError if Horovod is ``running`` (over MPI) with other settings."""
    settings = {name: os.environ.get(name) for name in _READ_ONCE}
    if _started and running and settings != _started:
        names = ", ".join(name for name in _READ_ONCE if settings[name] != _started[name])
        raise EngineError(
            f"Horovod over MPI starts only once in a process, so {names} cannot change; train in a new process"
        )
    _started.update(settings)


def pace() -> str:
    """Returns the cycle time for the first line of a run."""
    rounds = os.environ.get(ROUNDS)
    return f", a round every {float(rounds):g} ms" if rounds else ""

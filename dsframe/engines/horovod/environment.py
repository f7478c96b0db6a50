"""Horovod's environment variables: what it reads when it starts, and what it keeps when a process starts it again.

Horovod 0.28.1 reads its defaults anew at each start, the cycle time's after the environment's threshold, but keeps what an earlier
start has fixed. If every value is already fixed, a second start writes out of bounds and crashes (SIGSEGV in
``ParameterManager::BayesianParameter::SetValue``). What it has tuned is fixed on all ranks but the first; and what switches fusion
off is never switched back. A process starts it more than once where a program trains twice; over MPI never.
"""

from __future__ import annotations

import os

import torch

from dsframe.config.schema.settings import Horovod
from dsframe.engines import environment_scope
from dsframe.errors import EngineError

CPU_ROUND_MILLISECONDS = 5.0
"""Default time between two rounds of reductions on CPUs. A round that finds nothing takes 0.12 ms of a core; a
bucket waits half the time between two."""
THRESHOLD, ROUNDS, TUNES = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_AUTOTUNE"
APART = "HOROVOD_DISABLE_GROUP_FUSION"
"""Buckets that happen to be ready in the same round are reduced one by one. Fused, a number's place in the message, and with it
from three ranks on the order in which the ranks' summands are added, would depend on the moment: no two runs would be the same."""
ASYNC_COMPLETION = "HOROVOD_ENABLE_ASYNC_COMPLETION"

_READ_ONCE = (THRESHOLD, ROUNDS, APART, TUNES, "HOROVOD_TIMELINE")
_started: dict[str, str | None] = {}
"""Values that Horovod read when it started."""
_fixed: set[str] = set()
"""Names of values that its starts in this process have fixed."""


def settle_environment(settings: Horovod, device: torch.device, *, running: bool) -> float | None:
    """Before Horovod starts: puts the file's settings where it reads them. Returns the bytes of a bucket, if anybody says.

    The threshold goes there only where Horovod fuses; else buckets are cut by it, and Horovod takes them as they are. ``running``:
    whether it has started and not ended. Raises EngineError where a start would crash, or not do what the file says.
    """
    environment_scope.take_back()
    if settings.autotune:
        environment_scope.put(TUNES, "1")
    bucket_bytes: float | None = settings.fusion_threshold_bytes
    if tunes() or settings.op == "adasum":  # to be tuned; and adasum's parameters, in no bucket, would go one by one
        bucket_bytes = environment_scope.number(THRESHOLD, bucket_bytes, None)
    else:
        environment_scope.number(APART, None, 1)
        if bucket_bytes is None:
            bucket_bytes = environment_scope.number(THRESHOLD, None, None)
    # No default for what is to be tuned; nor next to a threshold, for both would be fixed.
    default = device.type == "cpu" and not tunes() and THRESHOLD not in os.environ
    environment_scope.number(ROUNDS, settings.cycle_time_milliseconds, CPU_ROUND_MILLISECONDS if default else None)
    if device.type == "cuda":  # the host hands buckets over and continues; else it waits for each
        environment_scope.number(ASYNC_COMPLETION, None, 1)
    if _started and not running:
        _refuse_another_start()
    return bucket_bytes


def note_start(*, running: bool) -> None:
    """Right before Horovod starts. Raises EngineError where it is ``running``, as it stays over MPI, with other settings."""
    settings = {name: os.environ.get(name) for name in _READ_ONCE}
    if _started and running and settings != _started:
        names = ", ".join(name for name in _READ_ONCE if settings[name] != _started[name])
        raise EngineError(
            f"Horovod over MPI starts only once in a process, so {names} cannot change; train in a new process"
        )
    _started.update(settings)
    _fixed.update(_fixes())


def tunes() -> bool:
    """True if Horovod tunes threshold and cycle time itself, as the file or the environment says."""
    return os.environ.get(TUNES, "0") not in ("", "0")


def pace() -> str:
    """Returns a few words for the first line of a run."""
    if tunes():
        return ", autotuned"
    rounds = os.environ.get(ROUNDS)
    return f", a round every {float(rounds):g} ms" if rounds else ""


def _fixes() -> set[str]:
    """Returns the names of values that a start with this environment fixes, also for later starts."""
    return {name for name in (THRESHOLD, ROUNDS) if name in os.environ} | ({TUNES} if tunes() else set())


def _refuse_another_start() -> None:
    now = _fixes()
    if TUNES in now | _fixed:
        raise EngineError(
            "Horovod cannot autotune in a process that starts it more than once (a second training): it would "
            f"crash, or tune nothing; remove horovod.autotune ({TUNES}), or train in a new process"
        )
    if ROUNDS in _fixed and THRESHOLD in now | _fixed:
        raise EngineError(
            f"unset {THRESHOLD}: Horovod crashes on a second start in a process (a second training) when it "
            f"and {ROUNDS} are both fixed; write horovod.fusion_threshold_bytes in the file instead"
        )

"""Runs a launcher and everything it starts as one job: signals reach all processes, none is left behind, and the exit
code is correct. Standard library only, and quick to import, because every run starts through it."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dsframe.host.processes import say_what_comes, state_and_parent

ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
FOR_WORKERS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
IGNORED = signal.SIGPIPE, signal.SIGXFSZ  # by Python itself, and a program that it starts inherits that
SAVING = ENDING  # the first of these asks to save and exit (`gentle`)
LEFTOVER_SECONDS = 5.0  # time after the launcher for a clean end: resource trackers, compile workers
UNHEARD_SECONDS = 2.0  # time after which a request before the workers is repeated: a starting Python may lose it
# DeepSpeed's launcher gives its workers 30 s between SIGTERM and SIGKILL. Tests shorten the time.
SHUTDOWN_SECONDS = float(os.environ.get("DSFRAME_SHUTDOWN_SECONDS", "40"))
# Launchers set these only for workers: DeepSpeed and torch, Horovod, and Open MPI below Horovod.
WORKER_VARIABLES = {b"LOCAL_RANK", b"HOROVOD_LOCAL_RANK", b"OMPI_COMM_WORLD_LOCAL_RANK"}
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


def next_on_path(script: Path) -> str | None:
    """Returns the next program on PATH with the script's name: for the commands in launch/bin."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        candidate = Path(folder or ".", script.name)
        if candidate.is_file() and os.access(candidate, os.X_OK) and not candidate.samefile(script):
            return str(candidate)
    return None


def run(
    program: str,
    arguments: list[str],
    environment: dict[str, str],
    *,
    gentle: bool = False,
    forwards: bool = False,
    brief: bool = False,
    received: list[int] | None = None,
) -> int:
    """Runs `program` to its end and returns its exit code: 128 + N if signal N ended it, 1 if it left processes behind.

    INT, TERM and HUP go to every process of the job, USR1 and USR2 only to its workers (they would end the launcher).
    This process forwards signals to a child, the supervisor, which the kernel notifies if this process is killed: even
    SIGKILL leaves nothing running.

    `gentle`: the first INT, TERM or HUP becomes USR1, at which dsframe's workers save and exit. Launchers end their
    workers within seconds of a TERM (mpirun) or at once (srun), saved or not. Without workers the launcher gets the
    signal, and after UNHEARD_SECONDS gets it again, or else new workers do. A worker that USR1 kills, such as one still
    importing, has the first signal's code.

    `forwards`: the program forwards USR1 and USR2 to its workers, perhaps on other nodes (mpirun, srun). `brief`: the
    program handles INT and TERM itself and ends its workers one by one (deepspeed.launcher.launch): the job has
    SHUTDOWN_SECONDS after the signal, and its code 1 becomes 128 + N. `received`: gets the received signals, which stay
    blocked after return.
    """
    heard = {*ENDING, *FOR_WORKERS, signal.SIGTSTP}
    heard = {number for number in heard if signal.getsignal(number) != signal.SIG_IGN}  # nohup, background jobs
    signal.pthread_sigmask(signal.SIG_BLOCK, {*heard, signal.SIGCHLD})  # they are waited for below
    adopt_orphans()
    front = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        os.setpgid(0, 0)
        alone = die_with_parent(front)
        os._exit(1 if alone else supervise(program, arguments, environment, heard, gentle, forwards, brief))
    while True:
        number = signal.sigwait({*heard, signal.SIGCHLD})
        if number == signal.SIGCHLD:
            pid, status = os.waitpid(supervisor, os.WNOHANG)
            if pid == supervisor:
                break
        else:
            if received is not None:
                received.append(number)
                if gentle and received == [signal.SIGINT]:
                    say_what_comes()
            os.kill(supervisor, number)
            if number == signal.SIGTSTP:
                os.kill(front, signal.SIGSTOP)  # returns when the shell continues us
                os.kill(supervisor, signal.SIGCONT)
    if os.WIFSIGNALED(status):  # the supervisor was killed: its children are now ours
        end_descendants()
    return exit_code(status)


def wait_for_signal(seconds: float) -> int:
    """Waits after a run. Returns early with the number of a signal that ends all; 0 if there was none."""
    limit = time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0:
        arrived = signal.sigtimedwait({*ENDING, signal.SIGCHLD}, left)
        if arrived and arrived.si_signo in ENDING:
            return int(arrived.si_signo)
    return 0


def supervise(
    program: str,
    arguments: list[str],
    environment: dict[str, str],
    heard: set[signal.Signals],
    gentle: bool,
    forwards: bool,
    brief: bool,
) -> int:
    adopt_orphans()
    launcher = start(program, arguments, environment)
    code: int | None = None
    asked_to_end = 0  # the signal
    patience = math.inf  # time until which processes may outlive the launcher
    unheard = math.inf  # time at which a request to end is repeated
    while True:
        for pid, status in ended_children():
            if pid == launcher:
                code = exit_code(status)
                patience = time.monotonic() + (SHUTDOWN_SECONDS if asked_to_end else LEFTOVER_SECONDS)
        if code is not None and not any(descendants()):
            ours = code == (1 if brief else 128 + signal.SIGUSR1)  # a worker that was asked too early
            return 128 + asked_to_end if asked_to_end and ours else code
        if time.monotonic() > patience:
            if not asked_to_end:
                warning = "dsframe: warning: the launcher ended before its workers: ending them"
                with contextlib.suppress(OSError):
                    print(warning, file=sys.stderr, flush=True)
            end_descendants()
            return code or (128 + asked_to_end if brief and asked_to_end else 1)
        wait = max(0.0, min(patience, unheard) - time.monotonic())
        arrived = signal.sigtimedwait({*heard, signal.SIGCHLD}, min(3600.0, wait))
        number = arrived.si_signo if arrived else 0
        repeats = not number and time.monotonic() >= unheard
        number = asked_to_end if repeats else number
        saves = gentle and number in SAVING and (repeats or not asked_to_end)
        unheard = math.inf if number in ENDING else unheard
        if number in ENDING and not asked_to_end:
            asked_to_end = number
            patience = min(patience, time.monotonic() + SHUTDOWN_SECONDS) if brief else patience
        hearing: list[int] = []
        if saves or number in FOR_WORKERS:
            hearing = [launcher] if forwards else workers()
        if number in FOR_WORKERS or hearing:
            for pid in hearing:
                signal_process(pid, signal.SIGUSR1 if saves else number)
        elif number in ENDING:
            signal_descendants(number)
            if saves and not repeats:
                unheard = time.monotonic() + UNHEARD_SECONDS
        elif number == signal.SIGTSTP:
            signal_descendants(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            signal_descendants(signal.SIGCONT)


def start(program: str, arguments: list[str], environment: dict[str, str]) -> int:
    """Starts the program in its own process group and returns its process id."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        with contextlib.suppress(OSError):
            os.execve(program, [program, *arguments], environment)
        print(f"dsframe: error: {program}: cannot be run", file=sys.stderr, flush=True)
        os._exit(126)
    with contextlib.suppress(PermissionError):  # it has already called execve, after its own setpgid
        os.setpgid(child, child)  # here too: a signal may arrive before the child's call
    return child


def die_with_parent(parent: int | None = None) -> bool:
    """Asks Linux for SIGTERM when this process's parent ends, because a parent killed by SIGKILL would leave it
    running. Returns True if ``parent`` had already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)
    return parent is not None and os.getppid() != parent


def adopt_orphans() -> None:
    """Makes every descendant whose parent ends a child of this process, which can then wait for it."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ended_children() -> Iterator[tuple[int, int]]:
    """Yields process id and wait status of each child that has ended since the last call."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def descendants() -> Iterator[int]:
    """Yields every running process below this one."""
    parents, ended = {}, set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            state, parent = state_and_parent(int(folder.name))
            parents[int(folder.name)] = parent
            if state == b"Z":
                ended.add(int(folder.name))
    for pid in parents:
        ancestor = parents[pid]
        while ancestor != os.getpid() and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor == os.getpid() and pid not in ended:
            yield pid


def workers() -> list[int]:
    """Returns the descendants with a rank, without their own children."""
    ranked = {pid for pid in descendants() if WORKER_VARIABLES & set(variables(pid))}
    return [pid for pid in ranked if state_and_parent(pid)[1] not in ranked]


def variables(pid: int) -> set[bytes]:
    """Returns the names of a process's environment variables."""
    try:
        return {entry.partition(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    except OSError:
        return set()


def end_descendants() -> None:
    """Ends every process below this one: asks them first, then kills them."""
    for number, seconds in ((signal.SIGTERM, LEFTOVER_SECONDS), (signal.SIGKILL, math.inf)):
        limit = time.monotonic() + seconds
        signal_descendants(number)
        while any(descendants()) and time.monotonic() < limit:
            for _ in ended_children():
                pass
            time.sleep(0.05)
            if number == signal.SIGKILL:
                signal_descendants(number)  # processes started meanwhile


def signal_process(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def signal_descendants(number: int) -> None:
    """Signals each descendant separately, because launchers use several process groups."""
    for pid in descendants():
        signal_process(pid, number)


def exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code

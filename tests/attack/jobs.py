"""Processes that are killed, and signals to those who wait for them."""

import contextlib
import functools
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from dsframe.errors import StoppedError
from tests.attack.arena import EVERY, UntriedError, goes_on, held, needs_root, told, train, whole
from tests.portability import MODELS

CGROUPS = Path("/sys/fs/cgroup")


def _in_training(running, chance):
    first = chance.choice(["step-00000004", "step-00000008", "step-00000012"])
    running.wait_for(lambda: first in running.output, timeout_seconds=60, what=first)
    time.sleep(chance.random() * 0.5)


def kill(folder, chance, **settings):
    """SIGKILL to one of two ranks, as the kernel does where memory is short."""
    rank = chance.randrange(2)

    def strike(running):
        _in_training(running, chance)
        running.ranks()[rank].kill()

    finished = train(folder, ranks=2, during=strike, env={"STEP_SECONDS": "0.1"}, **settings)
    held(finished.returncode, "exit code 0", finished)
    goes_on(folder, 2, **settings)
    return f"rank {rank} of 2 killed: exit code {finished.returncode}"


def kill_stateful(folder, chance):
    """The same, of a model that keeps more than weights and moments from step to step."""
    kind = chance.choice(["Centre", "Codebook", "Limited", "Dropping"])
    settings = {"task": {"name": f"tests.attack.stateful_tasks:{kind}"}, "engine": chance.choice(["ddp", "deepspeed"])}
    settings |= chance.choice([{}, {"ema": {"decay": 0.9}}])
    settings["checkpoints"] = {"every_steps": EVERY, "keep_last": 9, "asynchronous": chance.choice([True, False])}
    return (
        f"{settings['engine']}, {kind}, {'' if 'ema' in settings else 'no '}average: {kill(folder, chance, **settings)}"
    )


def kill_restarted(folder, chance, engine, kills=3):
    """Ranks killed one after another under ``dsframe launch --restarts``, two of three while a checkpoint is being written.

    The run ends by itself as if nothing had happened, in half of the tries with evaluations that take longer than a step.
    """
    evaluates = chance.random() < 0.5
    checkpoints = {"every_steps": EVERY, "keep_last": 20, "asynchronous": chance.random() < 0.5}
    settings = {"engine": engine, "task": MODELS["gpt"], "steps": 64, "checkpoints": checkpoints}
    settings["sections"] = {"zero_optimization": {"stage": 2 if engine == "deepspeed" else 0}}
    often = {"eval_every_steps": EVERY, "eval_micro_batch_size": 1, "eval_samples": 32} if evaluates else {}
    saves, killed, said = folder / "run" / "checkpoints", set(), []

    def partial(since):
        with contextlib.suppress(FileNotFoundError):
            return [path.name[1:14] for path in sorted(saves.glob(".step-*.partial")) if path.stat().st_mtime > since]
        return []

    def kill_rank(running, rank, after):
        in_save = chance.random() < 2 / 3
        running.wait_for(lambda: set(running.ranks()) == {0, 1}, timeout_seconds=60, what="two ranks")
        since = time.time()  # what lies there from a save that was killed is not written by these ranks
        if after:
            first = saves / f"step-{after:08}"
            running.wait_for(first.is_dir, timeout_seconds=120, what=first.name)
        while in_save and not partial(since) and running.process.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.random() * (0.03 if in_save else 0.3))
        process = running.ranks()[rank]
        said.append(f"rank {rank} {' '.join(partial(since)) or 'in no save'}")
        killed.add(process.pid)
        process.kill()
        running.wait_for(
            lambda: killed.isdisjoint(process.pid for process in running.ranks().values()),
            timeout_seconds=60,
            what="its end",
        )

    def strike(running):
        for after in sorted(chance.sample(range(0, 14 * EVERY, EVERY), kills)):
            kill_rank(running, chance.randrange(2), after)

    launch = ("--restarts", str(kills), "--restart-wait", "0.1")
    train(folder, ranks=2, launch=launch, during=strike, seconds=120 + 60 * kills, **settings, **often).check()
    whole(folder, 2, **settings)
    return f"{engine}{', with evaluations' if evaluates else ''}, killed: {', '.join(said)}: same losses"


@contextlib.contextmanager
def _short_of_memory(limit):
    """A control group with a limit that the kernel keeps to, which is tried first."""
    needs_root()
    old = CGROUPS / "memory"
    group = (old if old.is_dir() else CGROUPS) / f"dsframe-attack-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(limit)
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise UntriedError(f"no control group for memory: {error.strerror}") from None
    try:
        enter = f"echo $$ > {group}/cgroup.procs; exec"
        tried = subprocess.run(["sh", "-c", f"{enter} python -c 'bytearray(1 << 28)'"], check=False, timeout=60)
        if tried.returncode != -signal.SIGKILL:
            raise UntriedError("the kernel does not keep to a control group's limit of memory here")
        yield group
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def out_of_memory(folder, chance):
    """One rank is in a control group whose memory ends; the kernel kills it."""
    with _short_of_memory("64M") as group:

        def strike(running):
            _in_training(running, chance)
            (group / "cgroup.procs").write_text(str(running.ranks()[1].pid))

        task = {"name": "tests.faults.slow_task:GrowingTask"}
        finished = train(folder, ranks=2, during=strike, env={"STEP_SECONDS": "0.1"}, task=task)
    held(finished.returncode, "exit code 0", finished)
    goes_on(folder, 2, task=task)
    return f"one rank out of memory: exit code {finished.returncode}"


def launcher_signals(folder, chance):
    """Signals to ``dsframe launch --restarts``, once or twice, in any order, at any moment."""
    signals = [
        chance.choice([signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
        for _ in range(chance.randint(1, 3))
    ]
    gap = chance.choice([0.0, 0.2, 6.0])

    def strike(running):
        if chance.random() < 0.7:
            _in_training(running, chance)
        else:
            time.sleep(chance.random() * 4)
        for number in signals:
            with contextlib.suppress(ProcessLookupError):
                running.process.send_signal(number)
            time.sleep(gap)

    launch = ("--restarts", "3", "--restart-wait", "0.1")
    finished = train(folder, ranks=2, launch=launch, during=strike, env={"STEP_SECONDS": "0.1"}, seconds=200)
    names = ", ".join(number.name for number in signals)
    if finished.returncode:
        told(finished)
        if set(signals) == {signal.SIGUSR1}:
            held(finished.returncode == StoppedError.exit_code, names, finished)
        goes_on(folder, 2)
    else:
        whole(folder, 2)
    return f"{names} to the launcher, {gap} s apart: exit code {finished.returncode}"


def double_interrupt(folder, chance):
    """Ctrl-C twice, as a terminal does it: to the whole foreground group."""
    gap = chance.choice([0.05, 0.5, 2.0])
    by = chance.choice(["python", "launch"])

    def strike(running):
        _in_training(running, chance)
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGINT)
            time.sleep(gap)

    launch = ("--restarts", "3", "--restart-wait", "0.1") if by == "launch" else ()
    ranks = 2 if launch else 1
    # Ranks ask each other every two seconds whether to stop: twelve steps are longer.
    finished = train(folder, ranks=ranks, launch=launch, during=strike, env={"STEP_SECONDS": "0.3"})
    told(finished)
    goes_on(folder, ranks)
    return f"Ctrl-C twice, {gap} s apart, to {by}: exit code {finished.returncode}"


def reader(folder, chance):
    """A process that reads data is killed, or stopped."""
    number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])

    def strike(running):
        _in_training(running, chance)
        rank = running.ranks().get(0) or psutil.Process(running.process.pid)
        living = [one for one in rank.children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too: it has just ended
            if readers := [one for one in living if "resource_tracker" not in " ".join(one.cmdline())]:
                chance.choice(readers).send_signal(number)

    task = {"name": "tests.faults.slow_task:ReadingTask"}
    finished = train(folder, during=strike, env={"STEP_SECONDS": "0.1"}, task=task)
    if finished.returncode:
        told(finished)
        goes_on(folder, task=task)
    else:
        whole(folder)
    return f"{number.name} to a reader: exit code {finished.returncode}"


ATTACKS = {
    "killed rank": kill,
    "killed rank, stateful model": kill_stateful,
    **{
        f"killed rank, restarted on {engine}": functools.partial(kill_restarted, engine=engine)
        for engine in ("deepspeed", "horovod", "ddp")
    },
    "out of memory": out_of_memory,
    "signals to the launcher": launcher_signals,
    "double Ctrl-C": double_interrupt,
    "killed reader": reader,
}

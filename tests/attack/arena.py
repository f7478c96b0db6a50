"""What every attack needs: a short training, its undisturbed losses, and what it means that something is lost."""

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from dsframe.checkpoint import store
from dsframe.checkpoint.store import Store
from dsframe.tools.compare import losses
from tests.files import ds_config, write_json
from tests.processes import free_port, python, run_ranks, warm

STEPS, EVERY = 24, 4


class LostError(AssertionError):
    """Saved state is gone or differs, a file is outside its folder, or a mistake is not said in one line."""


class UntriedError(Exception):
    """This machine cannot be attacked so; with the reason."""


def kept():
    """A folder that is there until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="dsframe-attack-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def held(condition, what, finished=""):
    """Raises LostError unless ``condition``."""
    if not condition:
        raise LostError(f"{what}\n{finished}")


def write(folder, *, ranks=2, **settings):
    """The training's file; ``settings`` go into its dsframe section."""
    dsframe = {
        "engine": "ddp" if ranks > 1 else "single",
        "steps": STEPS,
        "log_every_steps": 1,
        "checkpoints": {"every_steps": EVERY, "keep_last": 9},
        "hang_timeout_seconds": 20,
        "task": {"name": "tests.faults.slow_task:SlowTask"},
        **settings,
    }
    file = ds_config(8, "AdamW", 0.01, **dsframe)
    write_json(folder / "attack.json", file)


def train(
    folder,
    *arguments,
    ranks=1,
    launch=(),
    env=None,
    during=None,
    seconds=120.0,
    **settings,
):
    """One run in ``folder/run``, by python or torchrun; ``launch``: by ``dsframe launch`` with these options."""
    write(folder, ranks=ranks, **settings)
    training = ["--config", "attack.json", "--run-dir", "run", *arguments]
    if launch:
        command = python(["-m", "dsframe.cli", "launch", "-np", str(ranks), *launch, *training])
    elif ranks > 1:
        command = started([""] * ranks, " ".join(training))
    else:
        command = python(["-m", "dsframe.train", *training])
    variables = {"STEP_SECONDS": "0.02", "DSFRAME_SHUTDOWN_SECONDS": "10", **(env or {})}
    return run_ranks(command, cwd=folder, env=variables, timeout_seconds=seconds, while_running=during)


def started(enter, training, address="127.0.0.1"):
    """A shell that starts ranks without a launcher: what they print is theirs alone, and none is ended for another.

    enter: for each rank the command that enters its host, "" where it is this one; each of the others has one rank.
    """
    size, port, lines = len(enter), free_port(), []
    for rank, wrap in enumerate(enter):
        local = "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1" if wrap else f"LOCAL_RANK={rank} LOCAL_WORLD_SIZE={size}"
        place = f"RANK={rank} WORLD_SIZE={size} {local} MASTER_ADDR={address} MASTER_PORT={port}"
        lines.append(f'{place} {wrap} python -m dsframe.train {training} & pids="$pids $!"')
    return ["bash", "-c", "\n".join([*lines, "for pid in $pids; do wait $pid || code=$?; done", "exit $code"])]


def undisturbed(folder, *arguments, ranks=1, **settings):
    """The training of `train` where nothing is done to it: without pauses, in ranks that are forked."""
    write(folder, ranks=ranks, **settings)
    command = warm(ranks, ["-m", "dsframe.train", "--config", "attack.json", "--run-dir", "run", *arguments])
    return run_ranks(command, cwd=folder, env={"STEP_SECONDS": "0"}, timeout_seconds=120)


@functools.cache
def _expected(ranks, settings):
    with tempfile.TemporaryDirectory() as name:
        undisturbed(Path(name), ranks=ranks, **json.loads(settings)).check()
        return losses(Path(name, "run"))


def expected(ranks, **settings):
    """The losses of a run that nobody attacks."""
    return _expected(ranks, json.dumps(settings))


def whole(folder, ranks=1, *, run="run", **settings):
    """The run came to its end as if nothing had happened."""
    found, wanted = losses(folder / run), expected(ranks, **settings)
    held(found == wanted, f"losses differ: {sorted(set(found.items()) ^ set(wanted.items()))[:4]}")
    checkpoints = Store(folder / run / "checkpoints")
    damaged = [path.name for path in checkpoints.newest_first() if store.verify(path)] + checkpoints.damaged()
    held(not damaged, f"damaged: {damaged}")


def told(finished, *codes):
    """It ended with one of ``codes`` (any but 0, where there are none), and said so without a traceback."""
    held(finished.returncode in codes if codes else finished.returncode, f"exit code {finished.returncode}", finished)
    # torch's reader, where Python takes it away while its processes end.
    output = re.sub(r"^Exception ignored in: .*\nTraceback ", "", finished.output, flags=re.MULTILINE)
    traceback = re.search(r"^(\[rank \d+\] )?Traceback .*(?:\n(?!\[rank).*){0,60}", output, re.MULTILINE)
    held(not traceback or "torch.distributed.elastic" in traceback[0], "a traceback instead of a line", finished)


def goes_on(folder, ranks=1, **settings):
    """What was saved is there: going on from it is the undisturbed training."""
    saved = [path.name for path in Store(folder / "run" / "checkpoints").newest_first()]
    finished = undisturbed(folder, "--resume", "auto", ranks=ranks, **settings)
    held(finished.returncode == 0, f"does not go on after {saved}", finished)
    whole(folder, ranks, **settings)


@functools.cache
def interposed():
    """The library of interpose.c. Raises UntriedError where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise UntriedError("no C compiler")
    target = kept() / "interpose.so"
    source = Path(__file__).with_name("interpose.c")
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UntriedError(f"interpose.c cannot be compiled: {done.stderr.strip()[:200]}")
    return str(target)


def disk(order):
    """The environment of processes whose disk fails as ``order`` says (interpose.c)."""
    return {"LD_PRELOAD": interposed(), "ATTACK_DISK": order}


def needs_root():
    """Raises UntriedError for who may not mount."""
    if os.getuid() != 0:
        raise UntriedError("needs root")

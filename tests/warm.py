"""Ranks that begin with everything imported: for tests of what engines compute, which are many, and not of how they are started.

    run_ranks(warm(2, ["-m", "dsframe.train", "--config", "zero1.json"]))

Importing torch and DeepSpeed takes a process longer than the few steps of most tests. A server imports them once, starts
nothing, and for each job forks its ranks: processes of their own, with the directory, the environment (MASTER_PORT with it) and
the output of the command that asked for them, and RANK and its like from torch's launcher. What forked ranks have in common and
started ones do not (the hash seed, so the order of sets; warnings of imports, which test_warm.py looks at once; torchrun's agent)
and how ranks come up is for tests/engines/test_launchers.py, every engine under every launcher, and for tests/faults.

This file is both ends. ``python -S warm.py SOCKET N ARGUMENTS`` asks the server at SOCKET, and ends with the job's exit code:
that of the first rank that failed, whose peers then get SIGTERM, as torchrun does it. Who ends the asker ends the job.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

PATIENCE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
LARGEST_REQUEST = 1 << 20
SET_NAME = 15  # prctl(2)


LATE = (
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.utils.pin_memory",
    "horovod.runner.common.util.hosts",
    "encodings.idna",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
"""What torch, DeepSpeed, Horovod and tasks import when an optimizer, an engine, a process group or a model is made."""


# The asker. It imports little.


def ask(server, arguments):
    """Has the server run ``arguments``, the number of ranks before them, here; returns the exit code."""
    request = {"arguments": arguments, "directory": str(Path.cwd()), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
        line.connect(server)
        socket.send_fds(line, [json.dumps(request).encode()], [1, 2])
        answer = line.recv(64)
    return int(answer) if answer else 1


# The server.


def serve(path):
    """Forks jobs until its standard input ends."""
    import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # jobs answer for themselves
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(path)
        door.listen()
        while True:
            ready, _, _ = select.select([door, 0], [], [])
            if 0 in ready:
                return
            line, _ = door.accept()
            if os.fork() == 0:
                door.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os._exit(run_job(line, Path(path).parent))
            line.close()


def import_everything():
    """What ranks import sooner or later, dsframe's own modules too but for those that run as programs or need what is not here."""
    import importlib
    import pkgutil

    import dsframe
    from dsframe.data import _torchvision
    from dsframe.errors import DsframeError, TaskError

    with contextlib.suppress(TaskError):
        _torchvision.torchvision()  # before transformers, which imports it
    for name in LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for module in pkgutil.walk_packages(dsframe.__path__, "dsframe."):
        if module.name != "dsframe.train" and "._" not in module.name:  # the latter: imported where a task needs them
            with contextlib.suppress(ImportError, DsframeError):  # the latter: an engine whose library is missing
                importlib.import_module(module.name)
    importlib.import_module("dsframe.config").load({"train_batch_size": 1})  # compiles its schema
    sys.modules.pop("dsframe.train", None)  # somebody's import: as a program it is to begin anew
    gc.freeze()  # what is imported stays: a rank need not look through it, as DeepSpeed has it do at start


def run_job(line, folder):
    """Reads the request, forks the ranks and waits for all of them. Leaves its session's number in ``folder``."""
    content, (out, err), _, _ = socket.recv_fds(line, LARGEST_REQUEST, 2)
    request = json.loads(content)
    os.setsid()
    mark = request["environment"]["DSFRAME_TEST_ID"]
    (folder / f"{mark}.{os.getpid()}").touch()  # by which tests/processes.py knows this job's processes
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(file, number)
    count, *arguments = request["arguments"]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    ranks = set()
    for rank in range(int(count)):
        process = os.fork()
        if process == 0:
            line.close()
            ctypes.CDLL(None).prctl(SET_NAME, f"rank {rank}".encode())  # for who looks at it from outside
            if int(count) > 1:
                os.environ.update(
                    RANK=str(rank), WORLD_SIZE=count, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=count, GROUP_RANK="0",
                    MASTER_ADDR="127.0.0.1",
                )  # fmt: skip
            run_program(arguments)
        ranks.add(process)
    code = wait(ranks, line)
    with contextlib.suppress(BrokenPipeError):  # the asker is gone
        line.send(str(code).encode())
    return 0


def run_program(arguments):
    """As ``python ARGUMENTS`` would, ``-m MODULE`` or a file first; never returns."""
    import atexit
    import random
    import runpy
    import threading
    import traceback

    import numpy

    random.seed()  # each rank its own, as processes that are started have
    numpy.random.seed()
    code = 0
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    try:
        if arguments[0] == "-m":
            sys.path[:0] = [str(Path.cwd()), *(path for path in paths if path not in sys.path)]
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:0] = [str(Path(arguments[0]).resolve().parent), *paths]
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(ranks, line):
    """Until no rank is left; the first code that is not 0. Ends all where one has failed or the asker is gone."""
    first, patience = 0, None
    while ranks:
        for rank in sorted(ranks):
            process, status = os.waitpid(rank, os.WNOHANG)
            if process:
                ranks.discard(rank)
                code = os.waitstatus_to_exitcode(status)
                first = first or (code if code >= 0 else 128 - code)
        gone = bool(select.select([line], [], [], 0.02)[0]) and not line.recv(1)
        if ranks and (first or gone) and patience is None:
            patience = time.monotonic() + (0.0 if gone else PATIENCE_SECONDS)
            send(ranks, signal.SIGTERM)
        if patience is not None and time.monotonic() > patience:
            send(ranks, signal.SIGKILL)
    return first


def send(ranks, number):
    for rank in ranks:
        os.kill(rank, number)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))

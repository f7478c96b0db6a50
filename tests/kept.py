"""Ranks that are kept, for tests that train often: file after file in the processes of one job.

    finished = kept.train(folder, document, 2).check()
    finished = kept.run(folder, ["--config", "zero1.json", "--resume", path], 2).check()        # words of dsframe.train

The first training of a process takes as long as the next four, so the ranks stay until the tests end. The module of the file's
task is imported anew for each training. What a process that ends, its exit code or its launcher has to show is for ``run_ranks``.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid

from dsframe.errors import DsframeError
from tests.files import write_json
from tests.processes import Finished, end, environment, marked, stacks_of, warm

TIMEOUT_SECONDS = 280.0
LARGEST_REQUEST = 1 << 16
PEERS_SECONDS = 2.0
"""For the other ranks, where one has ended with an error: those that still wait for it then are ended."""


# The ranks.


def serve(door):
    """Trains in each folder that it is told of, until there are no more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(door)
        while order := line.recv(LARGEST_REQUEST):
            line.send(str(_fit(*json.loads(order))).encode())
            gc.collect()  # the threads of its process groups
            gc.freeze()  # DeepSpeed keeps its models: each later collection would look through all of them
    from dsframe.train import leave_at_once

    leave_at_once(0)


def _fit(folder, words):
    """The exit code that a program had. ``words``: of its command line."""
    from dsframe.config import load
    from dsframe.run import execute
    from dsframe.train import parse

    os.chdir(folder)
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    try:
        options = parse(words)
        config = load(options.config, options.set)
        sys.modules.pop(config.settings.task.name.partition(":")[0], None)
        execute(config, resume=options.resume)
    except DsframeError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"dsframe: {error.printed}", file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


# The test.


class Ranks:
    """A job of ``count`` ranks."""

    def __init__(self, count):
        self.mark = uuid.uuid4().hex
        self.usable = True
        with (
            tempfile.TemporaryDirectory(prefix="dsframe-kept-") as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door,
        ):
            door.bind(f"{folder}/door")
            door.listen()
            door.settimeout(TIMEOUT_SECONDS)
            self._job = subprocess.Popen(
                warm(count, ["-m", "tests.kept", f"{folder}/door"]),
                env=environment(self.mark),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._lines = [door.accept()[0] for _ in range(count)]

    def train(self, folder, words):
        """The first exit code that is not 0. Afterwards the ranks are usable if each of them has ended its training."""
        self.usable = False
        for line in self._lines:
            line.send(json.dumps([str(folder), words]).encode())
        waiting, first, limit = set(self._lines), 0, time.monotonic() + TIMEOUT_SECONDS
        while waiting and (ready := select.select(waiting, [], [], max(0.0, limit - time.monotonic()))[0]):
            for line in ready:
                code = int(line.recv(16) or 1)
                first = first or code
            waiting -= set(ready)
            if first:
                limit = min(limit, time.monotonic() + PEERS_SECONDS)
        if waiting and not first:
            raise AssertionError(f"still running after {TIMEOUT_SECONDS:.0f} s\n{stacks_of(marked(self.mark))}")
        self.usable = not waiting
        return first

    def close(self):
        for line in self._lines:
            line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._job.wait(timeout=0.0 if not self.usable else 10.0)
        end(self.mark)
        self._job.wait()


_kept = {}


@functools.cache
def _ranks_end_with_the_tests():
    atexit.register(close)  # after the server of tests/warm.py was registered, so before it ends


def train(folder, document, count):
    """Goes on from the training before in this folder, if there was one."""
    write_json(folder / "file.json", document)
    return run(folder, ["--config", "file.json", "--resume", "auto"], count)


def run(folder, words, count):
    """What ``python -m dsframe.train WORDS`` trains in this folder."""
    outputs = folder / "stdout", folder / "stderr"
    for output in outputs:
        output.write_text("")
    started = time.monotonic()
    ranks = _kept.get(count) or _kept.setdefault(count, Ranks(count))
    _ranks_end_with_the_tests()
    try:
        code = ranks.train(folder, words)
    finally:
        if not ranks.usable:
            _kept.pop(count).close()
    said = (output.read_text(encoding="utf-8", errors="replace") for output in outputs)
    return Finished(("kept.run", *words), code, *said, time.monotonic() - started)


def close():
    """Ends all ranks."""
    while _kept:
        _kept.popitem()[1].close()


if __name__ == "__main__":
    serve(sys.argv[1])

"""The gate that every contestant of ``benchmarks.compare`` passes once in a micro-batch: inside its loss function.

A contestant is a real training job that would go on for ever. Where it computes its loss it stops until it is told how many steps
to take, takes them at full speed, and says how long they took. So all contestants of a match are started once, and then run in
turns for as many rounds as wanted; who waits is stopped by a signal and takes nothing from who runs. Between two calls of the
gate lies exactly one step, whatever the loop around it does and whoever wrote it.
"""

import json
import os
import socket
import time
from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812  # the name that every torch program uses

CHECKED_STEPS = 10
"""The first steps see images without augmentation, so that all contestants see the same, and their losses are compared."""


class Gate:
    """One rank's side. ``per_step``: how many micro-batches make a step."""

    def __init__(self, path, name, per_step=1):
        self._socket = socket.socket(socket.AF_UNIX)
        self.folder = Path(path).parent  # the match's own: what is written there goes with it
        self._path, self._name, self._per_step = path, name, per_step
        self._file = None
        self._calls = 0
        self._start = self._stop = -1  # in calls
        self._began = self._began_cpu = 0.0
        self._losses = []
        self._notes = False

    def wait(self):
        """Called before each loss. Returns at once but at the end of a block."""
        if self._calls == self._start:
            self._began, self._began_cpu = time.perf_counter(), time.process_time()
        if self._stop < 0:
            self._socket.connect(self._path)
            self._file = self._socket.makefile("rw")
            self._stop = 0
            self._say({"name": self._name, "pid": os.getpid(), "threads": torch.get_num_threads()})
        if self._calls == self._stop:
            if self._calls:
                seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._began_cpu
                self._say({"seconds": seconds, "cpu": cpu, "peak": peak_bytes(), "losses": self._losses})
            line = self._file.readline()
            if not line:
                os._exit(0)  # the match is over
            order = json.loads(line)
            self._losses, self._notes = [], order["check"]
            self._start = self._calls + order["warm"] * self._per_step
            self._stop = self._start + order["steps"] * self._per_step
            if self._calls == self._start:
                self._began, self._began_cpu = time.perf_counter(), time.process_time()
        self._calls += 1

    def _say(self, words):
        self._file.write(json.dumps(words) + "\n")
        self._file.flush()

    def loss(self, outputs, targets):
        """Cross entropy over the last dimension of scores: what every contestant trains with."""
        counts = torch.is_grad_enabled()  # dsframe tries the loss on parts of the first batch, too
        if counts:
            self.wait()
        loss = F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())
        if self._notes and counts:
            self._losses.append(loss.item())
        return loss


def peak_bytes():
    """The largest resident set of this process so far; on a GPU the most that torch had allocated there."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

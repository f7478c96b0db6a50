"""Runs contestants of ``benchmarks.compare`` in turns: each is a job of two processes, started once and alive to the end.

Who waits is stopped by SIGSTOP, so that its threads and loader processes take nothing from who runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import processes
from dsframe.cluster.rendezvous import free_port

REPOSITORY = Path(__file__).resolve().parents[1]
RANKS = 2
PATIENCE_SECONDS = 240.0
"""For a contestant to start or to finish a block, compilation included."""


@dataclass(frozen=True)
class Contestant:
    """A job: who it is and how it is started."""

    name: str
    launcher: str
    program: str
    """A script of this folder."""
    arguments: tuple[str, ...]
    """Before the workload's name."""
    config: Mapping[str, Any] | None = None
    """The file, for dsframe."""
    threads: int | None = 1
    """OMP_NUM_THREADS; None: not set, as people start it."""
    micro: int = 1

    def command(self, workload, path, folder):
        words = [str(REPOSITORY / "benchmarks" / self.program), *self.arguments, workload, str(path)]
        if self.config is not None:
            file = folder / f"{self.name.replace(' ', '-')}.json"
            file.write_text(json.dumps(self.config))
            words += [str(self.micro), "--config", str(file), "--run-dir", str(folder / f"{file.stem}-run"), "--quiet"]
        if self.launcher == "horovodrun":
            return ["horovodrun", "-np", str(RANKS), "python", *words]
        if self.launcher == "deepspeed":
            return ["deepspeed", f"--num_gpus={RANKS}", f"--master_port={free_port()}", *words]
        return ["torchrun", f"--nproc-per-node={RANKS}", f"--master-port={free_port()}", *words]


@dataclass
class Result:
    """What a contestant did."""

    rates: list[float] = field(default_factory=list)
    """Units a second of each round."""
    losses: list[float] = field(default_factory=list)
    """Of the first steps, over the global batch."""
    peak_bytes: list[int] = field(default_factory=list)
    """By rank that has a loss."""
    threads: int = 0
    cpu_rates: list[float] = field(default_factory=list)
    """Units a second of processor time, all ranks' together: what another program on the machine changes least."""


class Job:
    """A contestant that runs."""

    def __init__(self, contestant, workload, folder):
        self.contestant, self.result = contestant, Result()
        self._path = folder / "gate"
        folder.mkdir()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._path))
        self._server.listen(RANKS)
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])])
        environment.setdefault("DS_ACCELERATOR", "cpu")
        # Horovod's ranks talk all the time and give up after 30 s; the clock goes on while they are stopped.
        environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "3600"
        if contestant.threads is not None:
            environment["OMP_NUM_THREADS"] = str(contestant.threads)
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._job = processes.start(
                contestant.command(workload, self._path, folder),
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._process = self._job.process
        self._files = []
        self._sockets = []
        self._workers = []
        # Only the last stage of a pipeline has a loss.
        self._speakers = 1 if contestant.micro > 1 else RANKS

    def meet(self):
        """Waits until every rank stands at the gate, then stops it."""
        while len(self._files) < self._speakers:
            self._await(self._server)
            connection, _ = self._server.accept()
            file = connection.makefile("rw")
            self._files.append(file)
            self._sockets.append(connection)
            words = json.loads(file.readline())
            self.result.threads = words["threads"]
            parent = psutil.Process(words["pid"]).parent()
            siblings = parent.children() if parent and self._speakers < RANKS else [psutil.Process(words["pid"])]
            self._workers += siblings
        self._signal(signal.SIGSTOP)

    def block(self, warm, steps, *, check=False):
        """Takes ``warm`` and then ``steps`` steps, and returns what the latter took: seconds on the slower rank, and seconds of
        processor time of all."""
        self._signal(signal.SIGCONT)
        for file in self._files:
            file.write(json.dumps({"warm": warm, "steps": steps, "check": check}) + "\n")
            file.flush()
        answers = []
        for connection, file in zip(self._sockets, self._files, strict=True):
            self._await(connection)
            line = file.readline()
            if not line:  # its process is gone; the launcher says why in a moment
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=10)
                raise RuntimeError(f"{self.contestant.name} ended:\n{self._why()}")
            answers.append(json.loads(line))
        self._signal(signal.SIGSTOP)
        self.result.peak_bytes = [answer["peak"] for answer in answers]
        if check:
            micro = self.contestant.micro
            columns = list(zip(*(answer["losses"] for answer in answers), strict=True))
            means = [sum(column) / len(column) for column in columns]
            self.result.losses = [sum(means[i : i + micro]) / micro for i in range(0, len(means), micro)]
        return max(answer["seconds"] for answer in answers), sum(answer["cpu"] for answer in answers)

    def resident_bytes(self):
        """What a rank has resident now: the mean over those that stand at the gate."""
        return sum(worker.memory_info().rss for worker in self._workers) / len(self._workers)

    def _await(self, what):
        limit = time.monotonic() + PATIENCE_SECONDS
        while not select.select([what], [], [], 0.2)[0]:
            if self._process.poll() is not None or time.monotonic() > limit:
                how = "ended" if self._process.poll() is not None else f"is silent after {PATIENCE_SECONDS:.0f} s"
                raise RuntimeError(f"{self.contestant.name} {how}:\n{self._why()}")

    def _why(self):
        """What the job wrote, without what torchrun adds at its end."""
        return self._log.read_text(errors="replace").partition("torch.distributed.elastic.multiprocessing.errors")[0][
            -3000:
        ]

    def _signal(self, number):
        for worker in self._workers:
            with contextlib.suppress(psutil.Error):
                for process in (worker, *worker.children(recursive=True)):
                    process.send_signal(number)

    def end(self):
        """Ends every process of the job."""
        self._job.end()
        self._server.close()


def play(
    contestants,
    workload,
    *,
    units,
    rounds,
    block_seconds,
    checked,
    failed,
):
    """Starts all contestants and runs them in turns for ``rounds`` rounds of blocks of about ``block_seconds``.

    ``units``: samples or tokens of a step. Every other round runs in the opposite order. A rival that does not start is left
    out, and ``failed`` told why; raises RuntimeError where another thing goes wrong.
    """
    jobs = []
    with tempfile.TemporaryDirectory(prefix="dsframe-bench-") as folder, contextlib.ExitStack() as stack:
        for number, contestant in enumerate(contestants):
            jobs.append(Job(contestant, workload, Path(folder, str(number))))
            stack.callback(jobs[-1].end)
        steps = {}
        playing = jobs[:]
        for job in jobs:
            try:
                job.meet()
            except RuntimeError as error:
                if job is jobs[0]:
                    raise
                failed(str(error))
                playing.remove(job)
        for job in playing:
            job.block(0, checked, check=True)
            job.block(2, 2)  # some compile anew for what the first steps did not show
            seconds, _ = job.block(1, 3)
            steps[job.contestant.name] = max(3, round(block_seconds / (seconds / 3)))
        for number in range(rounds):
            for job in playing if number % 2 == 0 else playing[::-1]:
                count = steps[job.contestant.name]
                seconds, cpu = job.block(max(1, count // 10), count)
                job.result.rates.append(units * count / seconds)
                job.result.cpu_rates.append(units * count / cpu)
    return {job.contestant.name: job.result for job in playing}

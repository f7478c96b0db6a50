"""Starts a command on each of several hosts through ssh, keeps them alive together, and ends them together.

Runs as a process of its own, ``python -m dsframe.tools.launch.ssh_launch``, that ``dsframe launch`` supervises.
The variable DSFRAME_SPREAD holds the number of an open file that says what is to run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsframe.errors import WorldError
from dsframe.run_dir.outcome import Reporter
from dsframe.tools.launch.launchers import PASSED_ON
from dsframe.tools.launch.node import BEAT, BEAT_SECONDS, SIGNAL

VARIABLE = "DSFRAME_SPREAD"
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
SSH = ("ssh", *(word for option in _OPTIONS for word in ("-o", option)))
SSH_FAILED = 255
END_SECONDS = 60.0
"""Time for the other hosts to end if one has failed; a host that cannot be reached does not answer."""


def order(
    hosts: Sequence[tuple[str, bool]], commands: Sequence[Sequence[str]], environment: Mapping[str, str], report: str
) -> dict[str, str]:
    """The variable that tells this program what to run.

    ``hosts``: each one's name, and whether it is this machine. ``environment``: of the commands; only what another host cannot
    know by itself is sent.
    """
    sent = {name: value for name, value in environment.items() if name.startswith(PASSED_ON) and name != VARIABLE}
    words = list(dict.fromkeys(word for command in commands for word in command))  # most are the same on all hosts
    numbers = {word: number for number, word in enumerate(words)}
    content = {
        "hosts": hosts,
        "words": words,
        "commands": [[numbers[word] for word in command] for command in commands],
        "environment": sent,
        "directory": str(Path.cwd()),
        "report": report,
    }
    # In memory: a variable holds 128 KiB at most, which a thousand hosts exceed, and the disk shall not have what it holds.
    descriptor = os.memfd_create("dsframe-spread", 0)
    with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
        json.dump(content, file)
    return {VARIABLE: str(descriptor)}


def ordered() -> dict[str, Any]:
    """Returns what :func:`order` has written, in the process that it was written for."""
    descriptor = int(os.environ.pop(VARIABLE))
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    words = content["words"]
    content["commands"] = [[words[number] for number in command] for command in content["commands"]]
    return content


def ssh(host: str, directory: str, *words: str) -> list[str]:
    """The command that runs ``words`` on ``host``; they must be safe for a shell."""
    return [*SSH, host, f"cd {shlex.quote(directory)} && exec {' '.join(words)}"]


def python_path() -> list[str]:
    """The setting by which another host's Python finds what this one finds."""
    path = os.environ.get("PYTHONPATH")
    return [f"PYTHONPATH={shlex.quote(path)}"] if path else []


class Part:
    """One host's part of the job."""

    def __init__(self, host: str, is_here: bool, directory: str, order: Mapping[str, Any]) -> None:
        self.host, self.is_here = host, is_here
        agent = [sys.executable, "-m", "dsframe.tools.launch.node"]
        command = agent if is_here else ssh(host, directory, "env", *python_path(), *agent)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.tell(json.dumps(order))

    @property
    def code(self) -> int | None:
        """Returns how it ended; None while it goes on."""
        return self._process.poll()

    @property
    def is_lost(self) -> bool:
        """True if it ended because the host cannot be reached."""
        return not self.is_here and self.code == SSH_FAILED

    def tell(self, line: str) -> None:
        """Sends one line; whether somebody reads it shows in :attr:`code`."""
        assert self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def end(self) -> None:
        """Asks the host to end its part."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Gives the connection up."""
        self._process.kill()


def main() -> int:
    """Runs all parts and returns the exit code of the first that failed, 0 where none did."""
    content = ordered()
    pending: list[int] = []
    for passed_on in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(passed_on, lambda number, _: pending.append(number))
    same = {key: content[key] for key in ("directory", "environment")}
    parts = [
        Part(host, is_here, content["directory"], {**same, "command": words})
        for (host, is_here), words in zip(content["hosts"], content["commands"], strict=True)
    ]
    failed: Part | None = None
    limit, next_beat = 0.0, 0.0
    while any(part.code is None for part in parts):
        time.sleep(0.1)
        while pending:
            number = pending.pop(0)
            for part in parts:
                part.tell(f"{SIGNAL} {number}")
        if time.monotonic() >= next_beat:
            next_beat = time.monotonic() + BEAT_SECONDS
            for part in parts:
                part.tell(BEAT)
        if failed is None and (ended := [part for part in parts if part.code]):
            failed = next((part for part in ended if part.is_lost), ended[0])
            limit = time.monotonic() + END_SECONDS
            if failed.is_lost:
                text = f"lost the connection to {failed.host}; ending the other hosts' processes"
                print(f"dsframe launch: {text}\n", end="", file=sys.stderr, flush=True)
                Reporter(content["report"], 0).say(code=WorldError.exit_code, message=text, rank=None, step=None)
            for part in parts:
                part.end()
        if failed is not None and time.monotonic() > limit:
            for part in parts:
                part.kill()
    if failed is None:
        return next((part.code for part in parts if part.code), 0)
    code = failed.code or 1
    return WorldError.exit_code if failed.is_lost else 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())

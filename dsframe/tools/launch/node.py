"""One host's part of a job that ``dsframe launch`` spreads over several: runs a command as long as somebody asks for it.

    ssh HOST python -m dsframe.tools.launch.node      # standard input: what to run, one line of JSON; then a line every few seconds

A host that is cut off hears nothing any more, and ends its part instead of waiting for ever: a broken connection closes no socket.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from dsframe.host import supervise
from dsframe.tools.launch.launchers import program

BEAT, SIGNAL = "beat", "signal"
BEAT_SECONDS = 2.0
SILENCE_SECONDS = 20.0
"""Longest silence. ssh gives up a dead connection a little earlier (``ssh_launch``)."""
AGAIN_SECONDS = 6.0
"""Time after which a second signal makes a rank leave at once (``guard.signals``)."""


def main() -> int:
    """Runs the command that standard input names and returns its exit code."""
    inbox = Inbox()
    order = inbox.order()
    if order is None:
        return 1
    os.chdir(order["directory"])
    os.environ.update(order["environment"])
    name, *arguments = order["command"]
    path = program(name)
    agent = os.getpid()
    child = os.fork()
    if child == 0:
        if supervise.die_with_parent(agent):
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os._exit(supervise.run(path, arguments, dict(os.environ), gentle=True))
    ending_since: float | None = None
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return supervise.exit_code(status)
        for number in inbox.signals(0.2):
            os.kill(child, number)
        now = time.monotonic()
        if inbox.is_silent and ending_since is None:
            ending_since = now
            if not inbox.closed:
                what = f"nothing came from the first host for {SILENCE_SECONDS:.0f} s: the connection is lost"
                text = f"dsframe launch: {socket.gethostname()}: {what}; ending this host's processes\n"
                print(text, end="", file=sys.stderr, flush=True)
            os.kill(child, signal.SIGTERM)
        elif ending_since is not None and now - ending_since > AGAIN_SECONDS:
            ending_since = now
            os.kill(child, signal.SIGTERM)


class Inbox:
    """Lines from standard input."""

    def __init__(self) -> None:
        self._rest = b""
        self._heard = time.monotonic()
        self.closed = False
        """The other side has closed it: the job is to end."""

    @property
    def is_silent(self) -> bool:
        """True if nobody is there any more."""
        return self.closed or time.monotonic() - self._heard > SILENCE_SECONDS

    def order(self) -> dict[str, Any] | None:
        """The first line; None where none comes."""
        while not self.is_silent:
            for line in self._lines(1.0):
                order: dict[str, Any] = json.loads(line)
                return order
        return None

    def signals(self, seconds: float) -> list[int]:
        """The signals that were sent, after at most ``seconds``."""
        return [int(line.split()[1]) for line in self._lines(seconds) if line.startswith(SIGNAL)]

    def _lines(self, seconds: float) -> list[str]:
        if self.closed:
            time.sleep(seconds)
            return []
        if not select.select([0], [], [], seconds)[0]:
            return []
        new = os.read(0, 1 << 16)
        self.closed = not new
        self._heard = time.monotonic()
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [line.decode() for line in lines]


if __name__ == "__main__":
    sys.exit(main())

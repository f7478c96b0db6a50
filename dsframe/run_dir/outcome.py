"""How a run ended, reported by its processes as JSON lines in a file that ``dsframe launch`` reads.

Exit codes are not enough: DeepSpeed's launcher may return 0 after a kill, torchrun and horovodrun turn every failure
into 1, and a process sometimes ends in SIGABRT after a successful training. Without ``--report`` nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOST_A_PEER = "another process of this run has ended"
"""Message of a process that failed only because another one did."""


@dataclass(frozen=True)
class Outcome:
    """Combined reports of one attempt's processes."""

    began: bool = False
    """Training began: earlier checkpoints were archived or resumed from."""
    done: bool = False
    """Rank 0 finished and saved everything."""
    code: int | None = None
    """Exit code of the first process with an error of its own; if there is none, of one that lost a peer."""
    rank: int | None = None
    """Rank of that process."""
    step: int | None = None
    """Last step finished by any of the failed processes."""
    message: str = ""
    """First line of the error; empty if no process could report one (a kill)."""


class Reporter:
    """Writes one process's reports."""

    def __init__(self, path: str | None, rank: int) -> None:
        """``path``: None disables writing."""
        self._path = path
        self.rank = rank
        self.step = 0
        """Steps that this process has finished."""

    def say(self, **record: object) -> None:
        """Appends one line. Ignores write errors."""
        if self._path is None:
            return
        line = json.dumps({"rank": self.rank, "step": self.step, **record}) + "\n"
        with contextlib.suppress(OSError):
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.write(descriptor, line.encode())  # one write, so that lines of ranks do not mix
            os.close(descriptor)

    def failed(self, code: int, message: str) -> None:
        """Reports that this process is about to exit with ``code``."""
        self.say(code=code, message=message.strip().partition("\n")[0])


_current = Reporter(None, 0)


def start(path: str | None, rank: int) -> Reporter:
    """Sets and returns this process's reporter."""
    global _current
    _current = Reporter(path, rank)
    return _current


def reporter() -> Reporter:
    """Returns this process's reporter."""
    return _current


def _record(line: bytes) -> Mapping[str, Any] | None:
    """Parses a line; None if it is cut off, or if several nodes wrote it: on NFS they append at the same offset."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    wanted = {"rank", "step"} | ({"message"} if isinstance(record, dict) and "code" in record else set())
    return record if isinstance(record, dict) and wanted <= record.keys() else None


def read(path: Path) -> Outcome:
    """Combines the reports in ``path``; an empty Outcome if there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return Outcome()
    records = [record for line in lines if (record := _record(line)) is not None]
    failures = [record for record in records if "code" in record]
    causes = [record for record in failures if record["message"] != LOST_A_PEER]
    first = next(iter(causes or failures), None)
    return Outcome(
        began=any("began" in record for record in records),
        done=any(record.get("done") for record in records),
        code=first["code"] if first else None,
        rank=first["rank"] if first else None,
        step=max((record["step"] for record in failures if record["step"] is not None), default=None),
        message=causes[0]["message"] if causes else "",
    )

"""How a run ended, in the words of its processes: one line of JSON each, in a file that ``dsframe launch`` reads.

Exit codes are not enough: DeepSpeed's launcher can return 0 after a kill, torchrun and horovodrun make every failure 1, and a
process at times ends in SIGABRT after a training that went well. Where ``--report`` gives no file, nothing is written.
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
"""The message of a process that failed only because another one did."""


@dataclass(frozen=True)
class Outcome:
    """What the processes of one attempt said."""

    began: bool = False
    """Training began: earlier checkpoints are out of the way, or were gone on from."""
    done: bool = False
    """Rank 0 came to the end, with everything saved."""
    code: int | None = None
    """Exit code of the process that failed first of its own; of one that lost a peer where nobody else said anything."""
    rank: int | None = None
    """The process that said so."""
    step: int | None = None
    """The last step that any of the failed processes had finished."""
    message: str = ""
    """The first line of what was wrong; empty where no process could say it (a kill)."""


class Reporter:
    """Writes one process's part."""

    def __init__(self, path: str | None, rank: int) -> None:
        """``path``: None writes nothing."""
        self._path = path
        self.rank = rank
        """Who it is."""
        self.step = 0
        """Steps that this process has finished."""

    def say(self, **record: object) -> None:
        """Appends one line; a disk that does not let it is no reason to fail."""
        if self._path is None:
            return
        line = json.dumps({"rank": self.rank, "step": self.step, **record}) + "\n"
        with contextlib.suppress(OSError):
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.write(descriptor, line.encode())  # one write: other ranks' lines stay whole
            os.close(descriptor)

    def failed(self, code: int, message: str) -> None:
        """This process is about to leave with ``code``."""
        self.say(code=code, message=message.strip().partition("\n")[0])


_current = Reporter(None, 0)


def start(path: str | None, rank: int) -> Reporter:
    """This process's reporter from now on."""
    global _current
    _current = Reporter(path, rank)
    return _current


def reporter() -> Reporter:
    """This process's reporter."""
    return _current


def _record(line: bytes) -> Mapping[str, Any] | None:
    """What a line says; None where several hosts wrote it: on NFS they append at the same place."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    wanted = {"rank", "step"} | ({"message"} if isinstance(record, dict) and "code" in record else set())
    return record if isinstance(record, dict) and wanted <= record.keys() else None


def read(path: Path) -> Outcome:
    """What was said in ``path``; nothing where there is no file."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return Outcome()
    records = [record for line in lines if line.endswith(b"\n") and (record := _record(line)) is not None]
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

"""Writes one checkpoint to the disk in a thread while training continues.

Threads take part in no collective. When a rank's files are on the disk, its thread writes a status file to the folder.
Rank 0's thread waits for all status files, then commits. The folder is hidden until then, so a process that ends before
leaves an unfinished save.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

from dsframe.checkpoint.byte_files import catch_io_error
from dsframe.checkpoint.writer import Writer
from dsframe.text import Json

_POLL_SECONDS = 0.05


class Writing:
    """A save in progress on this rank."""

    def __init__(
        self,
        writer: Writer,
        folder: Path,
        rank: int,
        ranks: int,
        facts: Json,
        commit: Callable[[list[Json]], None] | None,
        sign_of_life: Callable[[], None],
    ) -> None:
        """``facts``: of this rank, as plain JSON values. ``commit``: called on rank 0 (None on others) with every
        rank's facts and ``runs``, what it has written; may raise OSError, CheckpointError."""
        self.failure = ""
        """This rank's error, or ""; valid after :meth:`wait`."""
        self.outcome = ""
        """Rank 0's error that prevented the checkpoint, or ""; valid after :meth:`finish`."""
        self._writer, self._folder, self._rank, self._ranks = writer, folder, rank, ranks
        self._facts, self._commit, self._sign_of_life = facts, commit, sign_of_life
        self._written, self._other_rank_failed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="dsframe-save", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """True if an error is known."""
        return bool(self.failure or self.outcome)

    def wait(self) -> None:
        """Waits until this rank's files are on the disk, or have failed."""
        self._written.wait()

    def finish(self, other_rank_failed: bool = False) -> None:
        """Waits for the thread. ``other_rank_failed``: rank 0 must not wait for its status file."""
        if other_rank_failed:
            self._other_rank_failed.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            failure = catch_io_error(lambda: self._writer.flush(self._sign_of_life))
        except Exception as error:  # otherwise the error would be lost
            failure = repr(error)
        finally:
            self._writer.close()
        report = {**self._facts, "failure": failure, "runs": self._writer.runs}
        # Also after a failure: rank 0 waits for the status.
        write_error = catch_io_error(lambda: self._write_status(json.dumps(report)))
        self.failure = failure or write_error
        self._written.set()
        if self._commit is not None and not self.failure:
            try:
                self.outcome = self._commit_when_all_wrote(self._commit)
            except Exception as error:
                self.outcome = repr(error)

    def _write_status(self, text: str) -> None:
        partial = self._status_file(self._rank).with_suffix(".partial")
        try:
            partial.write_text(text)
        except OSError:
            self._status_file(self._rank).touch()  # a full disk still has room for an empty file
            raise
        partial.rename(self._status_file(self._rank))

    def _status_file(self, rank: int) -> Path:
        return self._folder / f".rank-{rank:05}.json"

    def _commit_when_all_wrote(self, commit: Callable[[list[Json]], None]) -> str:
        reports: list[Json] = []
        for rank in range(self._ranks):
            while not self._status_file(rank).exists():
                if self._other_rank_failed.wait(_POLL_SECONDS):
                    return ""  # the caller knows the other rank's error
            text = self._status_file(rank).read_text()
            report: Json = json.loads(text) if text else {"failure": "there is no room for its status file"}
            if report["failure"]:
                return f"rank {rank}: {report['failure']}"
            reports.append(report)
            self._sign_of_life()

        def settle() -> None:
            for rank in range(self._ranks):
                self._status_file(rank).unlink()
            commit(reports)

        return catch_io_error(settle)

"""Errors: one class per kind of mistake.

Every message is written for the person who started the run: it says what is wrong, where, and what to do. ``python -m
dsframe.train`` and the ``dsframe`` command print only the message, without a traceback, and exit with the class's
``exit_code``. A traceback therefore always means a bug in dsframe, in the task, or in a library.

Each message has a label (``error:``, ``warning:``, ``note:``) and ends with a code in brackets, which ``dsframe
explain`` explains (``dsframe.config.codes``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsframe.text import shown

Severity = Literal["error", "warning", "note"]


class DsframeError(Exception):
    """Base class. ``str()`` is the whole message for the user, without label and code."""

    exit_code = 1
    code = "error"
    """Name of the kind of error, for ``dsframe explain``."""
    label = "error"
    first_is_gone = False
    """True if the node's first process has ended, so that another process must print the message."""

    @property
    def printed(self) -> str:
        """The message with label and code."""
        return f"{self.label}: {self} [{self.code}]"


@dataclass(frozen=True)
class Problem:
    """A problem in a configuration file: what is wrong, where, and the remedy."""

    severity: Severity
    path: str
    """Dotted path of the key, such as ``zero_optimization.stage``; empty for the file as a whole."""
    message: str
    """What is wrong, with the value."""
    remedy: str = ""
    """What to write instead."""
    file: str = ""
    line: int = 0
    """1-based; 0 if there is no position (a missing key, an override)."""
    column: int = 0
    """1-based, in characters."""
    code: str = field(kw_only=True)
    """Stable name of the kind of problem, such as ``unknown-key``, for editors, CI and ``dsframe explain``."""

    def __str__(self) -> str:
        position = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        line = ": ".join(part for part in (position, self.severity, self.path, self.message) if part)
        text = f"{line}; {self.remedy} [{self.code}]" if self.remedy else f"{line} [{self.code}]"
        return re.sub(
            r"[^\S \n]|[\ufeff\u200b-\u200f\u2060]", lambda blank: ascii(blank[0])[1:-1], text
        )  # invisible characters


class ConfigError(DsframeError):
    """The configuration is wrong. Holds all problems, not only the first."""

    exit_code = 2
    code = "configuration"

    @property
    def printed(self) -> str:
        """The problems, one per line, each with its own label and code."""
        return str(self)

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class WorldError(DsframeError):
    """The launcher's environment contradicts itself or cannot be used."""

    exit_code = 3
    code = "launcher"


class EngineError(DsframeError):
    """The engine is not installed, or does not support what the file asks for."""

    exit_code = 4
    code = "engine-unavailable"


class TaskError(DsframeError):
    """The task cannot be imported, or does not implement ``dsframe.Task``."""

    exit_code = 5
    code = "task"


class DataError(DsframeError):
    """Data are missing, truncated, or too few for one global batch."""

    exit_code = 6
    code = "data"


class TrainingError(DsframeError):
    """Training cannot continue: the loss is not finite, or another process of the run has ended."""

    exit_code = 7
    code = "training"


class CheckpointError(DsframeError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""

    exit_code = 8
    code = "checkpoint"


class HangError(DsframeError):
    """No step ended in time. The watchdog ends the process with this exit code; nothing raises this class."""

    exit_code = 9
    code = "hang"


class StoppedError(DsframeError):
    """A signal asked the run to stop: it has saved and can be resumed. The exit code is sysexits.h's EX_TEMPFAIL."""

    exit_code = 75
    code = "stopped"
    label = "note"


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit code. A DsframeError prints its message, without a traceback."""
    try:
        return int(command() or 0)
    except DsframeError as error:
        print(shown(error.printed, sys.stderr), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130

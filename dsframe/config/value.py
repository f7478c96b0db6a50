"""A checked configuration, as a value."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from dsframe.config.features import Feature, features
from dsframe.config.read import secrets
from dsframe.config.read.findings import Findings, Resolved, dotted
from dsframe.config.read.reader import Document, Raw, keys
from dsframe.config.resolve import batch
from dsframe.config.resolve.batch import MICRO, STEPS, TRAIN, Batch
from dsframe.config.resolve.facts import Facts
from dsframe.config.resolve.facts import check as check_facts
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import Settings
from dsframe.errors import ConfigError, Problem

Check = Callable[[Findings, Sequence[str], Facts, Path | None], "Examined"]


@dataclass(frozen=True, eq=False, repr=False)
class Examined:
    """Result of a check: problems, and the configuration if the text can be read."""

    problems: tuple[Problem, ...]
    config: Config | None
    """None when the text cannot be read or its top is not an object."""

    @property
    def accepted(self) -> Config:
        """The configuration. Raises ConfigError with every problem of severity error."""
        errors = [problem for problem in self.problems if problem.severity == "error"]
        if errors or self.config is None:
            raise ConfigError(errors)
        return self.config


@dataclass(frozen=True)
class Config:
    """A checked configuration. Immutable; :meth:`resolve` makes a new one."""

    path: Path | None
    """The file it came from."""
    deepspeed: DeepSpeed
    """DeepSpeed's keys, typed, with the defaults of DeepSpeed 0.19.8."""
    settings: Settings
    """The ``dsframe`` section."""
    problems: tuple[Problem, ...]
    """Warnings and notes."""
    resolved: tuple[Resolved, ...]
    """The values of ``"auto"`` and of ``{"epochs": n}``, and why."""
    facts: Facts
    """The facts by which they were resolved."""
    raw: Raw = field(repr=False)
    """What the user wrote, with overrides and what was repaired or resolved. Not to be changed."""
    overrides: tuple[str, ...] = field(repr=False)
    """``dotted.key=value`` of the command line."""
    findings: Findings = field(repr=False, compare=False)
    """The problems of the file, with the file itself: it is parsed once."""
    inherited: tuple[Resolved, ...]
    """Defaults of consequence that train because the file does not name them."""
    check: Check = field(repr=False, compare=False)
    """Says everything about what was parsed, for other facts."""

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """Everything that the file switches on."""
        return features(self.deepspeed, self.position)

    def resolve(self, facts: Facts) -> Config:
        """Return the same file, resolved with what is known now of the model and the data.

        It is checked once more only where values or rules depend on what is known now. Raises ConfigError where that contradicts
        the file.
        """
        known = replace(self.facts, **{key: value for key, value in vars(facts).items() if value is not None})
        if self.is_unresolved or known.engine != self.facts.engine or self.facts.world_size is not None:
            return self.examine(known).accepted
        findings = self.findings.empty_copy()
        findings.problems.extend(self.problems)
        check_facts(self.deepspeed, self.settings, known, findings)
        problems = findings.sorted()
        return Examined(problems, replace(self, facts=known, problems=problems)).accepted

    def examine(self, facts: Facts) -> Examined:
        """The same file checked once more, for these facts. It is not parsed again."""
        return self.check(Findings(self.findings.document, self.findings.file), self.overrides, facts, self.path)

    def with_content(self, raw: Raw) -> Config:
        """Another file, for the same facts. Raises ConfigError."""
        return self.check(Findings(Document("", raw, {}), ""), (), self.facts, None).accepted

    def batch(self, world_size: int, *, replicas: bool | None = None) -> Batch:
        """The batch sizes on ``world_size`` processes, exact.

        Args:
            replicas: Every process holds a whole model, whatever the file says about pipeline and tensor parallelism: as
                Horovod and DDP do. Default: as in ``facts``.

        Raises:
            ConfigError: they cannot be: the sizes disagree, or the world size does not divide.
        """
        findings = self.findings.empty_copy()
        whole = bool(self.facts.replicas) if replicas is None else replicas
        result = batch.solve(self.deepspeed, world_size, findings, whole)
        if result is None:
            raise ConfigError(findings.sorted())
        return result

    def position(self, path: tuple[str | int, ...]) -> tuple[int, int]:
        """Line and column of a key, or of the nearest one around it; (0, 0) where there is none."""
        return self.findings.position(path)

    def error(self, path: str | tuple[str | int, ...], message: str, remedy: str, *, code: str) -> Problem:
        """Returns an error about the key at ``path`` of this file."""
        path = keys(path)
        return Problem("error", dotted(path), message, remedy, str(self.path or ""), *self.position(path), code=code)

    def written(self) -> Raw:
        """A deep copy of what the user wrote, with overrides, and ``"auto"`` resolved or dropped."""
        return copy.deepcopy(self.raw)

    def shown(self) -> Raw:
        """A copy to be kept or printed: without passwords and keys of accounts."""
        public: Raw = secrets.without(self.raw)
        return copy.deepcopy(public)

    def for_deepspeed(self, world_size: int) -> Raw:
        """Return the dictionary for ``deepspeed.initialize``: only what the user wrote, without the ``dsframe`` section, with
        the batch triangle explicit in DeepSpeed's counting.

        Raises:
            ConfigError: as for ``batch``.
        """
        raw = self.written()
        raw.pop("dsframe", None)
        sizes = self.batch(world_size)
        return raw | {
            TRAIN: sizes.deepspeed_train_batch_size, MICRO: sizes.micro_batch_size, STEPS: sizes.accumulation_steps
        }  # fmt: skip

    @property
    def is_unresolved(self) -> bool:
        """True if what is known later may change values: an "auto", or a number of epochs in place of steps."""
        return bool(self.findings.resolved or self.findings.pending)

    @property
    def digest(self) -> str:
        """SHA-256 of what is shown of the resolved file: equal on all ranks, or they would train different things."""
        text = json.dumps(self.shown(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

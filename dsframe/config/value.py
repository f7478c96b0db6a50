"""The immutable result of reading a configuration file."""

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
    """Result of a check: the problems, and the configuration if the text can be parsed."""

    problems: tuple[Problem, ...]
    config: Config | None
    """None if the text cannot be parsed or its top level is not an object."""

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
    deepspeed: DeepSpeed
    """DeepSpeed's keys, typed, with the defaults of DeepSpeed 0.19.8."""
    settings: Settings
    problems: tuple[Problem, ...]
    """Warnings and notes."""
    resolved: tuple[Resolved, ...]
    """The values of ``"auto"`` and of ``{"epochs": n}``, with reasons."""
    facts: Facts
    """The facts that they were resolved with."""
    raw: Raw = field(repr=False)
    """The file's content with overrides, repairs and resolved values. Do not change it."""
    overrides: tuple[str, ...] = field(repr=False)
    """``dotted.key=value`` from the command line."""
    findings: Findings = field(repr=False, compare=False)
    """The problems, and the parsed file, so that it is parsed once."""
    inherited: tuple[Resolved, ...]
    """Defaults that affect the training and that the file does not set."""
    check: Check = field(repr=False, compare=False)
    """Checks the parsed file again with other facts."""

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """Every feature that the file switches on."""
        return features(self.deepspeed, self.position)

    def resolve(self, facts: Facts) -> Config:
        """Returns the same file, resolved with the facts known by now.

        Checked again only if values or rules depend on new facts. Raises ConfigError if the facts contradict the file.
        """
        all_facts = replace(self.facts, **{key: value for key, value in vars(facts).items() if value is not None})
        is_unresolved = self.findings.resolved or self.findings.pending  # an "auto", or epochs in place of steps
        if is_unresolved or all_facts.engine != self.facts.engine or self.facts.world_size is not None:
            return self.examine(all_facts).accepted
        findings = self.findings.empty_copy()
        findings.problems.extend(self.problems)
        check_facts(self.deepspeed, all_facts, findings)
        problems = findings.sorted()
        return Examined(problems, replace(self, facts=all_facts, problems=problems)).accepted

    def examine(self, facts: Facts) -> Examined:
        """Checks the same file with these facts, without parsing it again."""
        return self.check(Findings(self.findings.document, self.findings.file), self.overrides, facts, self.path)

    def with_content(self, raw: Raw) -> Config:
        """Returns the configuration for another content and the same facts. Raises ConfigError."""
        return self.check(Findings(Document("", raw, {}), ""), (), self.facts, None).accepted

    def batch(self, world_size: int, *, replicas: bool | None = None) -> Batch:
        """Returns the exact batch sizes on ``world_size`` processes.

        Args:
            replicas: True if every process holds a full model, whatever the file says (Horovod, DDP). Default: as in
                ``facts``.

        Raises:
            ConfigError: the sizes disagree, or the world size is not divisible.
        """
        findings = self.findings.empty_copy()
        full_replicas = bool(self.facts.replicas) if replicas is None else replicas
        result = batch.solve(self.deepspeed, world_size, findings, full_replicas)
        if result is None:
            raise ConfigError(findings.sorted())
        return result

    def position(self, path: tuple[str | int, ...]) -> tuple[int, int]:
        """Returns line and column of a key or of its nearest parent; (0, 0) if there is none."""
        return self.findings.position(path)

    def error(self, path: str | tuple[str | int, ...], message: str, remedy: str, *, code: str) -> Problem:
        """Returns an error about the key at ``path`` of this file."""
        path = keys(path)
        return Problem("error", dotted(path), message, remedy, str(self.path or ""), *self.position(path), code=code)

    def written(self) -> Raw:
        """Returns a deep copy of the file's content with overrides, and with ``"auto"`` resolved or dropped."""
        return copy.deepcopy(self.raw)

    def shown(self) -> Raw:
        """Returns a copy without secrets (passwords, API keys), for storing or printing."""
        public: Raw = secrets.without(self.raw)
        return copy.deepcopy(public)

    def for_deepspeed(self, world_size: int) -> Raw:
        """Returns the dictionary for ``deepspeed.initialize``: the user's keys without ``dsframe``, with all batch
        sizes.

        Raises:
            ConfigError: as for ``batch``.
        """
        raw = self.written()
        raw.pop("dsframe", None)
        sizes = self.batch(world_size)
        return raw | {
            TRAIN: sizes.micro_batch_size * sizes.accumulation_steps * sizes.deepspeed_ranks,
            MICRO: sizes.micro_batch_size, STEPS: sizes.accumulation_steps
        }  # fmt: skip

    @property
    def digest(self) -> str:
        """SHA-256 of ``shown()``, which must be equal on all ranks."""
        text = json.dumps(self.shown(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

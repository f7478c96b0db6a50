"""From a file to a ``Config``: read, apply overrides, repair, resolve, validate, check the rules."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dsframe.config import rules
from dsframe.config.features import Feature, features
from dsframe.config.read import overrides, repair, secrets, validate
from dsframe.config.read.findings import Findings, Resolved, dotted
from dsframe.config.read.legacy import OTHER_TOOLS
from dsframe.config.read.reader import Document, ReadError, inside, keys, read
from dsframe.config.read.suggest import did_you_mean
from dsframe.config.resolve import auto, batch, epochs, inherit
from dsframe.config.resolve.auto import Facts
from dsframe.config.resolve.batch import MICRO, STEPS, TRAIN, Batch
from dsframe.config.rules import report
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import Settings
from dsframe.errors import ConfigError, Problem

_NOTHING = Facts()


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
    """A checked configuration. Immutable; ``resolve`` makes a new one."""

    path: Path | None
    """The file it came from."""
    deepspeed: DeepSpeed
    """DeepSpeed's keys, typed, with the defaults of DeepSpeed 0.19.8."""
    settings: Settings
    """The ``dsframe`` section."""
    problems: tuple[Problem, ...]
    """Warnings and notes."""
    resolved: tuple[Resolved, ...] = ()
    """The values of ``"auto"`` and of ``{"epochs": n}``, and why."""
    facts: Facts = _NOTHING
    """The facts by which they were resolved."""
    _raw: dict[str, Any] = field(default_factory=dict, repr=False)
    _overrides: tuple[str, ...] = field(default=(), repr=False)
    _findings: Findings = field(default_factory=lambda: Findings(Document("", None, {}), ""), repr=False, compare=False)
    """The problems of the file, with the file itself: it is parsed once."""
    inherited: tuple[Resolved, ...] = ()
    """Defaults of consequence that train because the file does not name them."""

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """Everything that the file switches on."""
        return features(self.deepspeed, self.position)

    def batch(self, world_size: int, *, replicas: bool | None = None) -> Batch:
        """The batch sizes on ``world_size`` processes, exact.

        Args:
            replicas: Every process holds a whole model, whatever the file says about pipeline and tensor parallelism: as
                Horovod and DDP do. Default: as in ``facts``.

        Raises:
            ConfigError: they cannot be: the sizes disagree, or the world size does not divide.
        """
        findings = self._findings.empty_copy()
        whole = bool(self.facts.replicas) if replicas is None else replicas
        result = batch.solve(self.deepspeed, world_size, findings, whole)
        if result is None:
            raise ConfigError(findings.sorted())
        return result

    def position(self, path: tuple[str | int, ...]) -> tuple[int, int]:
        """Line and column of a key, or of the nearest one around it; (0, 0) where there is none."""
        return self._findings.position(path)

    def error(self, path: str | tuple[str | int, ...], message: str, remedy: str, *, code: str) -> Problem:
        """Returns an error about the key at ``path`` of this file."""
        path = keys(path)
        return Problem("error", dotted(path), message, remedy, str(self.path or ""), *self.position(path), code=code)

    def written(self) -> dict[str, Any]:
        """A deep copy of what the user wrote, with overrides, and ``"auto"`` resolved or dropped."""
        return copy.deepcopy(self._raw)

    def given(self) -> dict[str, Any]:
        """A deep copy of what the user wrote, with overrides, and ``"auto"`` where it stands."""
        raw: dict[str, Any] = copy.deepcopy(self._findings.document.root)
        overrides.apply(raw, self._overrides, self._findings.empty_copy())
        return raw

    def shown(self) -> dict[str, Any]:
        """A copy to be kept or printed: without passwords and keys of accounts."""
        public: dict[str, Any] = secrets.without(self._raw)
        return copy.deepcopy(public)

    def for_deepspeed(self, world_size: int) -> dict[str, Any]:
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

    def resolve(self, facts: Facts) -> Config:
        """Return the same file, resolved with what is known now of the model and the data.

        It is validated once more only where values or rules depend on what is known now.

        Raises:
            ConfigError: what is known now contradicts the file.
        """
        known = replace(self.facts, **{key: value for key, value in vars(facts).items() if value is not None})
        findings = self._findings.empty_copy()
        if self.is_unresolved or known.engine != self.facts.engine or self.facts.world_size is not None:
            return self.examined(known).accepted
        findings.problems.extend(self.problems)
        _check_facts(self.deepspeed, self.settings, known, findings)
        problems = findings.sorted()
        return Examined(problems, replace(self, facts=known, problems=problems)).accepted

    def examined(self, facts: Facts) -> Examined:
        """The same file checked once more, for these facts. It is not parsed again."""
        findings = Findings(self._findings.document, self._findings.file)
        return _validate(findings, self._overrides, facts, self.path)

    @property
    def is_unresolved(self) -> bool:
        """True if what is known later may change values: an "auto", or a number of epochs in place of steps."""
        return bool(self._findings.resolved or self._findings.pending)

    @property
    def digest(self) -> str:
        """SHA-256 of what is shown of the resolved file: equal on all ranks, or they would train different things."""
        import hashlib

        text = json.dumps(self.shown(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def load(name: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), facts: Facts | None = None) -> Config:
    """Read and check a file.

    Args:
        name: Path, or a name that ``find`` knows, or the file's content as a dictionary.
        overrides: ``dotted.key=value`` each; the value is JSON, else text.
        facts: What is known beside the file, for ``"auto"`` and the batch sizes.

    Raises:
        ConfigError: with every problem of severity error.
    """
    facts = facts or _NOTHING
    if isinstance(name, Mapping):
        return _validate(Findings(Document("", _as_json(name), {}), ""), overrides, facts, None).accepted
    path = find(name)
    text, problem = read_text(path)
    if problem:
        raise ConfigError([problem])
    return examine(text, str(path), overrides, facts, path).accepted


def _as_json(value: Any) -> Any:
    """A copy of ``value`` as a JSON file would have it: other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def read_text(path: Path) -> tuple[str, Problem | None]:
    """The text of a file, or why it cannot be read."""
    if path.suffix in (".yaml", ".yml", ".toml"):
        message, remedy = (
            f"{path.suffix[1:].upper()} is not read",
            f"write JSON: dsframe convert {path} --out {path.stem}.json",
        )
        return "", Problem("error", "", message, remedy, str(path), code="syntax")
    try:
        return path.read_bytes().decode("utf-8"), None
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text (byte {error.start})"
        return "", Problem("error", "", message, "save the file as UTF-8", str(path), code="syntax")
    except OSError as error:
        return "", Problem("error", "", f"cannot be read: {error.strerror}", "", str(path), code="missing-file")


def default_config() -> str:
    """The file that is used when none is named: ``config.json`` of the working directory, else one that comes with dsframe."""
    return "config.json" if Path("config.json").is_file() else "zero3.json"


def find(name: str | Path) -> Path:
    """The file of that name: as a path, then in ``ds_configs`` of the working directory, then among those that come
    with dsframe. The ending ``.json`` may be left out.

    Raises:
        ConfigError: there is none; the message lists where it was looked for.
    """
    package = Path(__file__).resolve().parents[1]
    folders = (Path(), Path("ds_configs"), package / "ds_configs", package.parent / "ds_configs")
    stem = str(name).removesuffix(".json")
    names = (str(name), f"{stem}.json")
    for path in (folder / spelling for folder in folders for spelling in names):
        if path.is_file():
            return path
    known = sorted(
        {path.stem for folder in folders[1:] for path in folder.glob("*.json") if ".schema" not in path.name}
    )
    files = [f"{other}.json" for other in known]
    remedy = did_you_mean(f"{Path(stem).name}.json", files, otherwise=f"choose from {', '.join(files)}")
    problem = Problem("error", "", "no such file, here or in ds_configs/", remedy, str(name), code="missing-file")
    raise ConfigError([problem])


def examine(
    text: str, name: str, overriding: Sequence[str] = (), facts: Facts = _NOTHING, path: Path | None = None
) -> Examined:
    """Check a text without running anything. Never raises for what the text says."""
    try:
        document = read(text)
    except ReadError as error:
        line, column = Document(text, None, {}).position(error.offset)
        problem = Problem("error", "", error.message, error.remedy, name, line, column, code="syntax")
        return Examined((problem,), None)
    return _validate(Findings(document, name), overriding, facts, path)


def _validate(findings: Findings, overriding: Sequence[str], facts: Facts, path: Path | None) -> Examined:
    """Everything that can be said about what was parsed, which stays as it is."""
    document = findings.document
    findings.overridden.update(overrides.paths(overriding))
    for duplicate, offset, first in document.duplicates:
        message = f"duplicate key, first on line {document.position(first)[0]}: DeepSpeed raises"
        findings.add("error", duplicate, message, "keep one", code="duplicate-key", offset=offset)
    if not _is_ours(document.root, findings):
        return Examined(findings.sorted(), None)
    raw = copy.deepcopy(document.root)
    overrides.apply(raw, overriding, findings)
    written = copy.deepcopy(raw)
    passed = repair.repair(raw, findings)
    inherited = inherit.fill(raw)
    auto.resolve(raw, facts, findings)
    epochs.resolve(raw, facts, findings)
    file = validate.validate(raw, findings)
    rules.check(RuleContext(file, raw, findings, facts.engine or file.dsframe.engine, facts.world_size))
    _check_facts(file, file.dsframe, facts, findings)
    for name in passed:
        _restore(raw, written, name)
    problems = findings.sorted()
    harmless = tuple(problem for problem in problems if problem.severity != "error")
    resolved = tuple(findings.resolved)
    config = Config(path, file, file.dsframe, harmless, resolved, facts, raw, tuple(overriding), findings, inherited)
    return Examined(problems, config)


def _is_ours(root: Any, findings: Findings) -> bool:
    """Report files that are no objects, and those of other programs."""
    if not isinstance(root, dict):
        findings.error((), "the top of the file must be an object {...}", code="type")
        return False
    for message, (names, remedy) in OTHER_TOOLS.items():
        if root.keys() & set(names) and not root.keys() & {TRAIN, MICRO, "dsframe", "optimizer", "zero_optimization"}:
            findings.error((), message, remedy, code="other-tool")
            return False
    if repair.has_no_known_key(root):
        message = "none of its keys is known to DeepSpeed: is this a DeepSpeed configuration?"
        findings.error((), message, "docs/configuration.md lists the keys", code="other-tool")
        return False
    return True


def _check_facts(file: DeepSpeed, settings: Settings, facts: Facts, findings: Findings) -> None:
    """Checks what the file alone does not decide: its batch and schedules for this number of processes and steps."""
    report.check_world(file, settings, facts.world_size, facts.total_steps, findings)
    if any(findings.fails(key) for key in (TRAIN, MICRO, STEPS)):
        return
    if facts.world_size is None:
        batch.check(file, findings)
    elif batch.solve(file, facts.world_size, findings, bool(facts.replicas)):
        batch.check_groups(file, facts.world_size, findings)


def _restore(raw: dict[str, Any], written: dict[str, Any], name: str) -> None:
    """Put back what ``dsframe.pass_through`` lists."""
    *parents, last = keys(name)
    source, target = inside(written, parents), inside(raw, parents)
    if isinstance(source, dict) and isinstance(target, dict) and last in source:
        target.setdefault(last, source[last])

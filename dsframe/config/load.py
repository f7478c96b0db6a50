"""From a file to a ``Config``: read, apply overrides, repair, resolve, validate, check the rules."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsframe.config import rules
from dsframe.config.read import overrides, repair, validate
from dsframe.config.read.findings import Findings, Fix, Resolved, dotted
from dsframe.config.read.reader import Document, ReadError, inside, read
from dsframe.config.resolve import auto, epochs, inherit, scaling
from dsframe.config.resolve.auto import Facts
from dsframe.config.resolve.batch import MICRO, STEPS, TRAIN, Batch, check_groups, missing, nearest, solve
from dsframe.config.rules import report
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.file import File
from dsframe.config.schema.settings import Settings
from dsframe.errors import ConfigError, Problem

DEFAULT_CONFIG = "zero3.json"
"""The file that is used when none is named."""

_NOTHING = Facts()
_EMPTY = Document("", None, {})
_BATCH = {TRAIN, MICRO}
_OTHER_TOOLS = (
    (
        "Hugging Face Accelerate",
        {"compute_environment", "distributed_type", "deepspeed_config_file", "deepspeed_config"},
        "check the file that its deepspeed_config_file names",
    ),
    (
        "DeepSpeed-Inference, not for training",
        {"replace_with_kernel_inject", "kernel_inject", "replace_method", "max_out_tokens", "load_with_sys_mem"},
        "give it to deepspeed.init_inference",
    ),
)
"""Program, keys that only its files have, and the remedy."""


@dataclass(frozen=True, eq=False, repr=False)
class Examined:
    """Result of a check: problems, and the configuration if the text can be read."""

    problems: tuple[Problem, ...]
    config: Config | None
    """None when the text cannot be read or its top is not an object."""
    document: Document | None = None
    fixes: tuple[Fix, ...] = ()


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
    _findings: Findings = field(default_factory=lambda: Findings(_EMPTY, ""), repr=False, compare=False)
    """What was found when the file was read, with the file itself: it is parsed once."""
    inherited: tuple[Resolved, ...] = ()
    """Defaults of consequence that train because the file does not say them."""

    def batch(self, world_size: int, *, replicas: bool | None = None) -> Batch:
        """The batch sizes on ``world_size`` processes, exact.

        Args:
            replicas: Every process holds a whole model, whatever the file says about pipeline and tensor parallelism: as
                Horovod and DDP do. Default: as in ``facts``.

        Raises:
            ConfigError: they cannot be: the sizes disagree, or the world size does not divide.
        """
        findings = self._findings.empty_copy()
        file = self.deepspeed
        assert isinstance(file, File)
        result = solve(file, world_size, findings, bool(self.facts.replicas) if replicas is None else replicas)
        if result is None:
            raise ConfigError(findings.sorted())
        return result

    def position(self, path: tuple[str | int, ...]) -> tuple[int, int]:
        """Line and column of a key, or of the nearest one around it; (0, 0) where there is none."""
        return self._findings.position(path)

    def error(self, path: tuple[str | int, ...], message: str, remedy: str, *, code: str) -> Problem:
        """Returns an error about the key at ``path`` of this file."""
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
        from dsframe.config.read import secrets

        found: dict[str, Any] = secrets.without(self._raw)
        return copy.deepcopy(found)

    def for_deepspeed(self, world_size: int) -> dict[str, Any]:
        """Return the dictionary for ``deepspeed.initialize``: only what the user wrote, without the ``dsframe`` section, with
        the batch triangle explicit in DeepSpeed's counting.

        Raises:
            ConfigError: as for ``batch``.
        """
        raw = self.written()
        raw.pop("dsframe", None)
        batch = self.batch(world_size)
        raw[TRAIN] = batch.deepspeed_train_batch_size
        raw[MICRO] = batch.micro_batch_size
        raw[STEPS] = batch.accumulation_steps
        return raw

    def resolve(self, facts: Facts) -> Config:
        """Return the same file, resolved with what is known now of the model and the data.

        Raises:
            ConfigError: what is known now contradicts the file.
        """
        known = replace(self.facts, **{key: value for key, value in vars(facts).items() if value is not None})
        found = self._findings
        if self.waits or known.engine != self.facts.engine or self.facts.world_size is not None:
            return _accept(_judge(found.document, found.file, self._overrides, known, self.path))
        findings = found.empty_copy()
        findings.problems.extend(self.problems)
        assert isinstance(self.deepspeed, File)
        _check_facts(self.deepspeed, known, findings)
        problems = findings.sorted()
        return _accept(Examined(problems, replace(self, facts=known, problems=_no_errors(problems))))

    @property
    def waits(self) -> bool:
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
    if isinstance(name, Mapping):
        return _accept(examine(_text_of(name), "", overrides, facts or _NOTHING))
    path = find(name)
    text, problem = read_text(path)
    if problem:
        raise ConfigError([problem])
    return _accept(examine(text, str(path), overrides, facts or _NOTHING, path))


def _text_of(content: Mapping[str, Any]) -> str:
    try:
        return json.dumps(content, indent=2, allow_nan=False, default=str)
    except ValueError as error:
        problem = Problem("error", "", f"the dictionary is not JSON: {error}", "write finite numbers", code="syntax")
        raise ConfigError([problem]) from None


def read_text(path: Path) -> tuple[str, Problem | None]:
    """The text of a file, or why it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8"), None
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text (byte {error.start})"
        return "", Problem("error", "", message, "save the file as UTF-8", str(path), code="syntax")
    except OSError as error:
        return "", Problem("error", "", f"cannot be read: {error.strerror}", "", str(path), code="missing-file")


def find(name: str | Path) -> Path:
    """The file of that name: as a path, then in ``ds_configs`` of the working directory, then among those that come
    with dsframe. The ending ``.json`` may be left out.

    Raises:
        ConfigError: there is none; the message lists where it was looked for.
    """
    package = Path(__file__).resolve().parents[1]
    folders = (Path(), Path("ds_configs"), package / "ds_configs", package.parent / "ds_configs")
    names = (str(name),) if str(name).endswith(".json") else (str(name), f"{name}.json")
    for folder in folders:
        for ending in names:
            if (folder / ending).is_file():
                return folder / ending
    there = (path for folder in folders[1:] for path in folder.glob("*.json"))
    known = sorted({path.stem for path in there if ".schema" not in path.name})
    from dsframe.config.read.suggest import closest

    similar = closest(Path(name).name.removesuffix(".json"), known)
    remedy = f'did you mean "{similar}.json"?' if similar else ""
    if not remedy and known:
        remedy = "choose from " + ", ".join(f"{stem}.json" for stem in known)
    message = "no such file, here or in ds_configs/"
    raise ConfigError([Problem("error", "", message, remedy, str(name), code="missing-file")])


def examine(
    text: str, name: str, overriding: Sequence[str] = (), facts: Facts = _NOTHING, path: Path | None = None
) -> Examined:
    """Check a text without running anything. Never raises for what the text says."""
    try:
        document = read(text)
    except ReadError as error:
        document = Document(text, None, {})
        line, column = document.position(error.offset)
        problem = Problem("error", "", error.message, error.remedy, name, line, column, code="syntax")
        return Examined((problem,), None)
    if not name:  # a dictionary has no lines
        document = replace(document, spans={})
    return _judge(document, name, overriding, facts, path)


def _judge(document: Document, name: str, overriding: Sequence[str], facts: Facts, path: Path | None) -> Examined:
    """Everything that can be said about what was parsed, which stays as it is."""
    findings = Findings(document, name, overrides.paths(overriding))
    for duplicate, offset, first in document.duplicates:
        message = f"duplicate key, first on line {document.position(first)[0]}: DeepSpeed raises"
        findings.add("error", duplicate, message, "keep one", code="duplicate-key", offset=offset)
    if not isinstance(document.root, dict):
        findings.error((), "the top of the file must be an object {...}", code="type")
        return Examined(findings.sorted(), None, document)
    for what, keys, remedy in _OTHER_TOOLS:
        if keys & document.root.keys() and not _BATCH & document.root.keys():
            findings.error((), f"this is a configuration for {what}", remedy, code="other-tool")
            return Examined(findings.sorted(), None, document)
    if repair.has_no_known_key(document.root):
        message = "none of its keys is known to DeepSpeed: is this a DeepSpeed configuration?"
        findings.error((), message, "see dsframe schema --markdown for the keys", code="other-tool")
        return Examined(findings.sorted(), None, document)
    raw = copy.deepcopy(document.root)
    overrides.apply(raw, overriding, findings)
    written = copy.deepcopy(raw)
    passed = repair.repair(raw, findings)
    inherited = inherit.fill(raw)
    auto.resolve(raw, facts, findings)
    epochs.resolve(raw, facts, findings)
    file = validate.validate(raw, findings)
    rules.check(RuleContext(file, raw, findings, facts.engine or file.dsframe.engine, facts.world_size))
    _check_facts(file, facts, findings)
    _restore(raw, written, passed)
    problems = findings.sorted()
    known = _no_errors(problems), tuple(findings.resolved), facts
    config = Config(path, file, file.dsframe, *known, raw, tuple(overriding), findings, inherited)
    return Examined(problems, config, document, tuple(findings.fixes))


def _no_errors(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    return tuple(problem for problem in problems if problem.severity != "error")


def _check_facts(file: File, facts: Facts, findings: Findings) -> None:
    """Checks what the file alone does not decide: its batch and schedules for this number of processes and steps."""
    report.check_world(file, facts.world_size, facts.total_steps, findings)
    _check_batch(file, facts, findings)


def _check_batch(file: File, facts: Facts, findings: Findings) -> None:
    if any(findings.fails((key,)) for key in (TRAIN, MICRO, STEPS)):
        return
    if facts.world_size is not None:
        batch = solve(file, facts.world_size, findings, bool(facts.replicas))
        if batch is not None:
            check_groups(file, facts.world_size, findings)
            scaled = scaling.sentence(file.dsframe.large_batch, batch.train_batch_size)
            if scaled:
                findings.note(("dsframe", "large_batch"), scaled, code="lr-scaling")
    elif file.train_batch_size is None and file.train_micro_batch_size_per_gpu is None:
        missing(findings)
    else:
        train, unit = file.train_batch_size, (file.train_micro_batch_size_per_gpu or 1)
        unit *= file.gradient_accumulation_steps or 1
        if train is not None and train % unit:
            parts = [f"{file.train_micro_batch_size_per_gpu} (micro)"] if file.train_micro_batch_size_per_gpu else []
            parts += [f"{file.gradient_accumulation_steps} (accumulation)"] if file.gradient_accumulation_steps else []
            message = f"{train} is not divisible by {' x '.join(parts)}, on any number of processes"
            remedy = f"the nearest legal batch sizes are {nearest(train, unit)}"
            findings.error((TRAIN,), message, remedy, code="batch", at_value=True)


def _restore(raw: dict[str, Any], written: dict[str, Any], passed: frozenset[str]) -> None:
    """Put back what ``dsframe.pass_through`` lists."""
    for name in passed:
        *parents, last = name.split(".")
        source, target = inside(written, tuple(parents)), inside(raw, tuple(parents))
        if isinstance(source, dict) and isinstance(target, dict) and last in source:
            target.setdefault(last, source[last])


def _accept(examined: Examined) -> Config:
    errors = [problem for problem in examined.problems if problem.severity == "error"]
    if errors or examined.config is None:
        raise ConfigError(errors)
    return examined.config

"""Builds a ``Config`` from a file: reads, applies overrides, repairs, resolves, validates and checks the rules."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsframe.config import rules
from dsframe.config.read import overrides, repair, validate
from dsframe.config.read.findings import Findings
from dsframe.config.read.legacy import OTHER_TOOLS
from dsframe.config.read.reader import Document, Raw, ReadError, inside, keys, read
from dsframe.config.read.suggest import did_you_mean, near_path
from dsframe.config.resolve import auto, epochs, inherit
from dsframe.config.resolve.batch import MICRO, TRAIN
from dsframe.config.resolve.facts import Facts
from dsframe.config.resolve.facts import check as check_facts
from dsframe.config.rules.context import RuleContext
from dsframe.config.value import Config, Examined
from dsframe.errors import ConfigError, Problem

_NOTHING = Facts()


def load(name: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), facts: Facts | None = None) -> Config:
    """Reads and checks a file.

    Args:
        name: Path, a name that ``find`` knows, or the file's content as a dictionary.
        overrides: ``dotted.key=value`` each; the value is JSON, else text.
        facts: What is known besides the file, for ``"auto"`` and the batch sizes.

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
    """Returns a copy of ``value`` as a JSON file would hold it; other objects become text."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def read_text(path: Path) -> tuple[str, Problem | None]:
    """Returns the text of a file, and the problem if it cannot be read."""
    if path.suffix in (".yaml", ".yml", ".toml"):
        message, remedy = f"{path.suffix[1:].upper()} is not read", "write JSON; docs/faq.md has a line that makes it"
        return "", Problem("error", "", message, remedy, str(path), code="syntax")
    try:
        return path.read_bytes().decode("utf-8"), None
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text (byte {error.start})"
        return "", Problem("error", "", message, "save the file as UTF-8", str(path), code="syntax")
    except OSError as error:
        return "", Problem("error", "", f"cannot be read: {error.strerror}", "", str(path), code="missing-file")


def default_config() -> str:
    """Returns the default file: ``config.json`` in the working directory, else one that comes with dsframe."""
    return "config.json" if Path("config.json").is_file() else "zero3.json"


def find(name: str | Path) -> Path:
    """Returns the path of a file, looked up as a path, in ``./ds_configs`` and in dsframe's ``ds_configs``, with or
    without the ending ``.json``.

    Raises:
        ConfigError: there is no such file; the message lists the known ones.
    """
    package = Path(__file__).resolve().parents[1]
    folders = (Path(), Path("ds_configs"), package / "ds_configs", package.parent / "ds_configs")
    stem = str(name).removesuffix(".json")
    names = (str(name), f"{stem}.json")
    for path in (folder / spelling for folder in folders for spelling in names):
        if path.is_file():
            return path
    stems = sorted(
        {path.stem for folder in folders[1:] for path in folder.glob("*.json") if ".schema" not in path.name}
    )
    files = [f"{other}.json" for other in stems]
    choose = did_you_mean(f"{Path(stem).name}.json", files, otherwise=f"choose from {', '.join(files)}")
    remedy = near_path(Path(name)).removeprefix("; ") or choose
    problem = Problem("error", "", "no such file, here or in ds_configs/", remedy, str(name), code="missing-file")
    raise ConfigError([problem])


def examine(
    text: str, name: str, overriding: Sequence[str] = (), facts: Facts = _NOTHING, path: Path | None = None
) -> Examined:
    """Checks a text without running anything. Never raises for its content."""
    try:
        document = read(text)
    except ReadError as error:
        line, column = Document(text, None, {}).position(error.offset)
        problem = Problem("error", "", error.message, error.remedy, name, line, column, code="syntax")
        return Examined((problem,), None)
    return _validate(Findings(document, name), overriding, facts, path)


def _validate(findings: Findings, overriding: Sequence[str], facts: Facts, path: Path | None) -> Examined:
    """Runs all checks on a parsed file, which is not changed."""
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
    check_facts(file, facts, findings)
    for name in passed:
        _restore(raw, written, name)
    problems = findings.sorted()
    harmless = tuple(problem for problem in problems if problem.severity != "error")
    resolved = tuple(findings.resolved)
    given = tuple(overriding)
    config = Config(path, file, file.dsframe, harmless, resolved, facts, raw, given, findings, inherited, _validate)
    return Examined(problems, config)


def _is_ours(root: Any, findings: Findings) -> bool:
    """Reports a file that is not an object or belongs to another program. Returns False for those."""
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


def _restore(raw: Raw, written: Raw, name: str) -> None:
    """Puts back a key that ``dsframe.pass_through`` lists."""
    *parents, last = keys(name)
    source, target = inside(written, parents), inside(raw, parents)
    if isinstance(source, dict) and isinstance(target, dict) and last in source:
        target.setdefault(last, source[last])

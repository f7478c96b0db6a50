"""``dsframe convert``: settings of Accelerate or the Hugging Face Trainer as a dsframe file.

Each setting is taken, changed, or listed as still to be done. What has a counterpart is in the table
``config/read/foreign.json``; ``convert_settings`` is for values that have another form.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsframe.errors import ConfigError, Problem
from dsframe.tools.commands import command
from dsframe.tools.conversion import Conversion
from dsframe.tools.convert_settings import accelerate, trainer

_TAG = "tag:yaml.org,2002:"
TASK = "my_module:MyTask"
"""What the file has in the place of the user's own task."""
KINDS = ("taken", "changed", "to do", "nothing to do")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command(
        "convert",
        "Write a dsframe file from Accelerate's YAML or a file of TrainingArguments; JSON from a ds_config in YAML or TOML.",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the file, or writes it, and says on standard error what became of each argument; returns 0.

    Raises ConfigError for a file that cannot be read, or that is none of these.
    """
    options = parser().parse_args(argv)
    converted = convert(options.file)
    if converted.entries:
        converted.document.setdefault("dsframe", {}).setdefault("task", {"name": TASK})
    text = json.dumps(converted.document, indent=2) + "\n"
    if options.out is None:
        print(text, end="")
    elif options.out.exists():
        raise _wrong(options.out, "exists already", "choose another name")
    else:
        options.out.write_text(text)
    print(*_lines(converted, options.out), sep="\n", file=sys.stderr)
    return 0


def _lines(converted: Conversion, out: Path | None) -> list[str]:
    lines = []
    for kind in KINDS:
        entries = [f"  {name}: {text}" for of_kind, name, text in converted.entries if of_kind == kind]
        lines += [f"{kind}:", *entries] if entries else []
    name = out or "FILE"
    processes = f" -np {converted.processes}" if converted.processes else ""
    if converted.entries:
        lines.append(f"Next: write your task in the place of {TASK} (docs/tasks.md), then dsframe check {name}")
    return [*lines, f"To start it: dsframe launch{processes} --config {name}"]


def convert(path: Path) -> Conversion:
    """Reads a file of any of the kinds. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, f"cannot be read: {error}", "give a text file") from None
    given = _mapping(path, text)
    if "distributed_type" in given or "compute_environment" in given:
        return accelerate(given, lambda named: _ds_config(path, named))
    if {"per_device_train_batch_size", "learning_rate", "output_dir", "num_train_epochs"} & given.keys():
        return trainer(given, lambda named: _ds_config(path, named))
    if path.suffix in (".yaml", ".yml", ".toml") and {"train_batch_size", "dsframe", "optimizer"} & given.keys():
        return Conversion(given)
    message = "is neither an Accelerate configuration (distributed_type) nor TrainingArguments (output_dir)"
    raise _wrong(path, message, "give one of these; a ds_config in JSON needs no conversion")


def _mapping(path: Path, text: str) -> dict[str, Any]:
    try:
        given = _parsed(path.suffix, text)
        json.dumps(given, allow_nan=False)
    except ImportError as error:
        remedy = "pip install pyyaml" if error.name == "yaml" else "use Python 3.11 or newer, or write JSON"
        raise _wrong(path, f"needs {error.name}, which is not installed", remedy) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(path, f"cannot be read: {error}", "correct the file") from None
    if not isinstance(given, dict):
        message = f"holds {type(given).__name__} where keys and values are expected"
        raise _wrong(path, message, "give another file")
    return {str(key): value for key, value in given.items()}


def _parsed(suffix: str, text: str) -> Any:
    """Raises ValueError for what is wrong in the text, ImportError for a missing reader."""
    if suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    if suffix not in (".yaml", ".yml"):
        return json.loads(text)
    return _yaml(text)


def _yaml(text: str) -> Any:
    """YAML 1.1 as far as JSON has its values, but 1e-3 is a number. Raises ValueError with the line."""
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_implicit_resolver(f"{_TAG}float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))

    def examine(node: Any) -> None:
        kind = node.tag.removeprefix(_TAG)
        if kind not in ("map", "seq", "str", "int", "float", "bool", "null"):
            raise ValueError(f"line {node.start_mark.line + 1}: {kind} is no value of JSON; quote it if it is text")
        names = set[str]()
        for part in node.value if kind in ("map", "seq") else ():
            key, value = part if kind == "map" else (None, part)
            if key is not None and key.value in names:
                raise ValueError(f"line {key.start_mark.line + 1}: duplicate key {key.value}; keep one")
            names.update([key.value] if key is not None else [])
            examine(value)

    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError("it has aliases (*name), which can grow without end; write the values out")
        if (root := yaml.compose(text, Loader)) is not None:
            examine(root)
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"line {error.problem_mark.line + 1}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _ds_config(path: Path, named: Any) -> dict[str, Any] | None:
    """A ds_config that a file names, or holds."""
    if named is None or isinstance(named, dict):
        return named
    for candidate in (path.parent / str(named), Path(str(named))):
        if candidate.is_file():
            return _mapping(candidate, candidate.read_text(encoding="utf-8-sig"))
    raise _wrong(
        path, f"names the ds_config {named}, which does not exist", "give its path from here, or from that file"
    )


def _wrong(path: Path, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("error", "", message, remedy, str(path), code="convert")])

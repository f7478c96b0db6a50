"""Writes the pages of docs/ that follow from the code, and the editors' schema (`make docs`)."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dsframe
import dsframe.data
from dsframe.config.codes import CODES, EXITS
from dsframe.config.schema.base import Section
from dsframe.config.schema.file import shape
from dsframe.tools.commands import COMMANDS, parser_of
from dsframe.tools.schema import describe, json_schema, sections, summary

ROOT = Path(__file__).resolve().parents[1]


def commands() -> Iterator[str]:
    """Yields docs/commands.md, of the commands' own parsers."""
    yield "# Commands\n\nWritten by `make docs` from the commands' own parsers; do not edit."
    yield "`dsframe COMMAND --help` prints the same.\n"
    yield "| command | does |\n|---|---|"
    yield from (f"| [`dsframe {name}`](#dsframe-{name}) | {text} |" for name, (_, text) in COMMANDS.items())
    for name in COMMANDS:
        parser = parser_of(name)
        yield f"\n## dsframe {name}\n\n{parser.description}\n"
        if name == "train":
            yield "The same as `python -m dsframe.train`, which a launcher starts in several processes.\n"
        yield "| option | meaning |\n|---|---|"
        for action in parser._actions:
            if action.help != argparse.SUPPRESS and action.dest != "help":
                yield f"| {_option(action)} | {_help(action, parser)} |"
        if parser.epilog:
            yield f"\n```text\n{parser.epilog.strip()}\n```"


def _option(action: argparse.Action) -> str:
    value = action.metavar or ("" if action.choices is None else "|".join(map(str, action.choices)))
    value = value or ("" if action.nargs == 0 else action.dest.upper())
    value = value if isinstance(value, str) else " ".join(value)
    words = ", ".join(f"`{name}`" for name in action.option_strings)
    return (words + (f" `{value}`" if value and action.nargs != 0 else "") if words else f"`{value}`").replace(
        "|", "\\|"
    )


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = {**vars(action), "prog": parser.prog}
    text = (action.help or "") % values
    choices = "" if action.choices is None or not action.metavar else f" ({', '.join(map(str, action.choices))})"
    return " ".join(text.split()).replace("|", "\\|") + choices


def api() -> Iterator[str]:
    """Yields docs/api.md, of the public names' docstrings."""
    yield "# Python\n\nThe public names, by their docstrings. Written by `make docs`; do not edit.\n"
    for module in (dsframe, dsframe.data):
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield from _documented(f"{module.__name__}.{name}", value)


def _documented(title: str, value: Any) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield _signature(title.rpartition(".")[2], value)
    yield _prose(value)
    if inspect.isclass(value):
        for name, member in vars(value).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
                yield f"\n### {title.rpartition('.')[2]}.{name}\n"
                yield _signature(name, function)
                yield _prose(function)


def _signature(name: str, value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except ValueError:
        return ""
    text = re.sub(r"<factory>|<dsframe[^>]*>| at 0x[0-9a-f]+", "...", text).replace("'", "")
    return f"```python\n{name}{text}\n```\n"


def _prose(value: Any) -> str:
    """The docstring, its sections (Args, Raises) as lists."""
    text = inspect.cleandoc(value.__doc__ or "")
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text).replace("``", "`")
    lines: list[str] = []
    section = False
    for line in text.splitlines():
        named = re.match(r"    (\*{0,2}\w+): (.*)", line)
        if re.fullmatch(r"(Args|Raises|Returns|Yields|Attributes):", line):
            section = True
            lines += ["", f"**{line.removesuffix(':')}**", ""]
        elif section and named:
            lines.append(f"- `{named[1]}`: {named[2]}")
        else:
            section = section and (not line or line.startswith("    "))
            lines.append(line.removeprefix("      ") if section else line)
    return "\n".join(lines)


def _type(owner: type[Section], key: str, limits: str) -> str:
    expected = shape(owner, key)
    if "any" in expected.kinds:
        return "any"
    text = "object" if expected.section else expected.phrase.replace(" in quotes", "").replace(" {...}", "")
    unit = ' or {"epochs": 1}' if expected.unit else ""
    return text.removesuffix(unit) + limits + unit


_SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def _limits(definition: dict[str, Any]) -> str:
    """Bounds of a number in a JSON Schema: `` (> 0)``."""
    branches = [definition, *definition.get("anyOf", ())]
    found = [f"{sign} {branch[name]:.15g}" for branch in branches for name, sign in _SIGNS.items() if name in branch]
    return f" ({', '.join(found)})" if found else ""


def _default(owner: type[Section], key: str) -> str:
    field = owner.model_fields[key]
    if field.is_required():
        return "required"
    if shape(owner, key).section:
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is None else f"`{json.dumps(value)}`"


_REFUSED = ("data_efficiency", "hybrid_engine")
"""Sections of DeepSpeed that no engine here accepts."""
_OF_A_LIBRARY = (*_REFUSED, "autotuning", "params")
"""Sections whose keys are listed without their meaning, which the library's own documentation has."""


def markdown() -> str:
    """Returns the reference of all keys, for docs/configuration.md: dsframe's own section first."""
    lines: list[str] = []
    for path, owner in sorted(sections(), key=lambda entry: entry[0][:1] != ("dsframe",)):
        texts = describe(owner)
        title = ".".join(path) if path else "DeepSpeed: top level"
        lines += [f"### {title}" if path else f"## {title}", "", summary(owner).replace("``", "`"), ""]
        if path and path[0] in _REFUSED:
            lines += ["Refused: no engine of dsframe accepts this section.", ""]
        keys = [key for key in owner.model_fields if not (path == () and shape(owner, key).section)]
        if keys and any(part.partition(" (")[0] in _OF_A_LIBRARY for part in path):
            lines += [", ".join(f"`{key}` {_default(owner, key)}".strip() for key in keys) + ".", ""]
            continue
        if keys:
            properties = owner.model_json_schema()["properties"]
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in keys:
            limits = _limits(properties[key])
            cells = (f"`{key}`", _type(owner, key, limits), _default(owner, key), texts.get(key, ""))
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("``", "`") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def messages() -> str:
    """The whole catalogue as docs/messages.md."""
    lines = [
        "# Messages",
        "",
        "Every error, warning and note of dsframe ends with a code in brackets. `dsframe explain CODE` prints what stands",
        "here. Written by `make docs` from dsframe/config/codes.py; do not edit.",
        "",
    ]
    for name, code in sorted(CODES.items()):
        lines += [f"## {name}", "", f"{code.means} {code.why}", "", f"What to write: {code.write}", ""]
        lines += ["```json", code.example, "```", ""] if code.example else []
        lines += [f"`dsframe {code.command}` shows the message.", ""]
    lines += ["## Exit codes", "", "| exit code | code | meaning | what to do |", "|---|---|---|---|"]
    for number, found in EXITS.items():
        name = f"`{found.code}`" if found.code else ""
        lines.append(f"| {number} | {name} | {found.means} | {found.do} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """What each generated file holds."""
    title = (
        "# Configuration\n\nEvery key that a file may have. Written by `make docs` from the schema; do not edit.\n\n"
        'Where a type has `{"epochs": 1}`, a number of epochs may stand for the number of steps that they take\n'
        "([Moving a script](porting.md#schedules)).\n\n"
    )
    return {
        ROOT / "docs" / "configuration.md": title + markdown(),
        ROOT / "docs" / "messages.md": messages(),
        ROOT / "docs" / "commands.md": "\n".join(commands()).strip() + "\n",
        ROOT / "docs" / "api.md": re.sub(r"\n{3,}", "\n\n", "\n".join(api())).strip() + "\n",
        ROOT / "ds_configs" / "dsframe.schema.json": json.dumps(json_schema(), indent=1) + "\n",
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")

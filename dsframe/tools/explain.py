"""``dsframe explain``: what a key of the file, the code at the end of a message, or an exit code means."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence

from dsframe.config.codes import CODES, EXITS
from dsframe.config.read import foreign
from dsframe.config.read.findings import show
from dsframe.config.read.suggest import did_you_mean
from dsframe.config.schema.base import Section
from dsframe.config.schema.file import shape
from dsframe.tools import schema
from dsframe.tools.commands import command

_WIDTH = 100


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Explain a key of the file, such as zero_optimization.stage, the code at the end of a message, such as "
    about += "[unknown-key], or an exit code, such as 5."
    result = command("explain", about)
    result.add_argument("codes", nargs="*", metavar="NAME", help="keys, codes or exit codes (default: list all codes)")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Print the explanations and return 0, or 2 if there is no such code."""
    options = parser().parse_args(argv)
    if not options.codes:
        print("\n".join(listing()))
        return 0
    status = 0
    for index, name in enumerate(options.codes):
        text = explanation(name.strip("[]"))
        if text is None:
            print(f"dsframe: error: {_unknown(name)}", file=sys.stderr)
            status = 2
        else:
            print(("\n" if index else "") + text)
    return status


def listing() -> list[str]:
    """One line for each code and exit code."""
    width = max(map(len, CODES))
    lines = ["codes of messages about a file:"]
    lines += [f"  {name:<{width}}  {_first(code.means)}" for name, code in sorted(CODES.items())]
    lines += ["", "exit codes, and the code of their message:"]
    lines += [f"  {number:<4}{ending.code:<{width - 2}}{_first(ending.means)}" for number, ending in EXITS.items()]
    return [*lines, "", "dsframe explain CODE says more."]


def explanation(name: str) -> str | None:
    """Everything about one code or key; None if there is none of that name."""
    if name in CODES:
        code = CODES[name]
        parts = [name, _wrapped(code.means), _wrapped(f"Why: {code.why}"), _wrapped(f"What to write: {code.write}")]
        command = f"    dsframe {code.command}"
        parts.append(f"Example:\n\n    {code.example}\n\n{command}" if code.example else f"Example:\n\n{command}")
        return "\n\n".join(parts)
    for number, ending in EXITS.items():
        if name == str(number) or (name == ending.code and name):
            title = f"exit code {number}" + (f" ({ending.code})" if ending.code else "")
            return "\n\n".join((title, _wrapped(ending.means), _wrapped(f"What to do: {ending.do}")))
    return _key(name)


def _key(name: str) -> str | None:
    """What a key of the file takes, or which keys a section has; None if there is no such key."""
    parent, _, key = name.rpartition(".")
    for section, owner in _sections():
        if section == name:
            texts = schema.describe(owner)
            width = max(map(len, owner.model_fields), default=0)
            lines = [f"  {key:<{width}}  {_first(texts.get(key, ''))}" for key in owner.model_fields]
            return "\n\n".join([name, _wrapped(schema.summary(owner)), "\n".join(lines)])
    for section, owner in _sections():
        if section == parent and key in owner.model_fields:
            field, text = owner.model_fields[key], schema.describe(owner).get(key, "").replace("``", "")
            default = "" if field.is_required() or field.default_factory else f" Default: {show(field.default)}."
            return "\n\n".join([name, _wrapped(text), _wrapped(f"Takes {shape(owner, key).phrase}.{default}")])
    target = foreign.target(name)
    words = foreign.advice(name) or (f"write {target}" if target else None)
    return f"{name}: a name of other trainers; {words}" if words else None


def _sections() -> list[tuple[str, type[Section]]]:
    """Each section of the file, by its dotted name."""
    return [(".".join(part.partition(" (")[0] for part in path), owner) for path, owner in schema.sections()]


def _unknown(name: str) -> str:
    known = [*CODES, *(ending.code for ending in EXITS.values() if ending.code), *keys()]
    return f'no code or key "{name}"; ' + did_you_mean(name.strip("[]"), known, 3, "dsframe explain lists all codes")


def keys() -> list[str]:
    """Every key of the file, dotted."""
    return [f"{section}.{key}".lstrip(".") for section, owner in _sections() for key in owner.model_fields]


def _first(text: str) -> str:
    return text.partition(". ")[0].removesuffix(".") + "."


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)

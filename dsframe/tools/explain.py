"""``dsframe explain``: explains a message code, an exit code, or a key of other trainers."""

from __future__ import annotations

import argparse
import sys
import textwrap

from dsframe.config.codes import CODES, EXITS
from dsframe.config.read import foreign
from dsframe.config.read.suggest import did_you_mean
from dsframe.tools.commands import Argv, command

_WIDTH = 100


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Explain the code at the end of a message, such as [unknown-key], an exit code, such as 5, or a key of "
    about += "another trainer, such as callbacks."
    result = command("explain", about)
    result.add_argument("codes", nargs="*", metavar="NAME", help="codes, exit codes or keys (default: list all codes)")
    return result


def main(argv: Argv = None) -> int:
    """Prints the explanations and returns 0, or 2 if a code is unknown."""
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
    """Returns one line for each code and exit code."""
    width = max(map(len, CODES))
    lines = ["codes of messages about a file:"]
    lines += [f"  {name:<{width}}  {_first(code.means)}" for name, code in sorted(CODES.items())]
    lines += ["", "exit codes, and the code of their message:"]
    lines += [f"  {number:<4}{ending.code:<{width - 2}}{_first(ending.means)}" for number, ending in EXITS.items()]
    return [*lines, "", "dsframe explain CODE says more."]


def explanation(name: str) -> str | None:
    """Returns everything about a code or another trainer's key; None if it is unknown."""
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
    return _foreign(name)


def _foreign(name: str) -> str | None:
    """Returns the equivalent of another trainer's key; None if it is unknown."""
    target = foreign.target(name)
    advice = foreign.advice(name) or (f"write {target}" if target else None)
    return f"{name}: a name of other trainers; {advice}" if advice else None


def _unknown(name: str) -> str:
    known = [*CODES, *(ending.code for ending in EXITS.values() if ending.code)]
    return f'no code "{name}"; ' + did_you_mean(name.strip("[]"), known, 3, "dsframe explain lists all codes")


def _first(text: str) -> str:
    return text.partition(". ")[0].removesuffix(".") + "."


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)

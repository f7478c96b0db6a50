"""Names of other trainers and their equivalents here: one table for ``dsframe check`` and ``dsframe explain``.

Sources: transformers 5.23 (``training_args.py``, ``trainer.py``), accelerate 1.15 (``utils/dataclasses.py``,
``commands/config``), lightning 2.6 (``trainer.py``, ``callbacks``, ``fabric/strategies/deepspeed.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from dsframe.text import Json, table_of


@cache
def table() -> Json:
    """Returns the table of ``foreign.json``, which is read only if a file has a foreign name."""
    groups: Json = table_of(__file__)
    by_name = {group: _by_name(groups[group]) for group in ("keys", "words")}
    return {**groups, **by_name, "nothing to do": frozenset(groups["nothing to do"].split())}


def _by_name(answers: Mapping[str, str]) -> dict[str, str]:
    return {name: answer for answer, names in answers.items() for name in names.split()}


def target(name: str) -> str | None:
    """Returns the dotted key that takes the same value here; None if there is none."""
    key: str | None = table()["keys"].get(name)
    return key


def advice(name: str) -> str | None:
    """Returns what to write instead of ``name`` if its value has another form here; None for unknown names."""
    text: str | None = table()["words"].get(name)
    return text


def answers(name: str) -> bool:
    """True if the table has the name."""
    return any(name in table()[group] for group in ("keys", "words", "nothing to do"))

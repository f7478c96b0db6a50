"""Rules in a table: contradicting values, keys without effect, and features that exclude each other.

A row of ``table.json`` says what is wrong (``says``) with ``key``, or each of ``keys``, and what to ``write``. It
applies

* if the key's value is one of ``is`` (absent: not the default), or the file has the key at all (``written``);
* under DeepSpeed, or not (``by_deepspeed``), on an engine that ``supports`` a feature, in a file with the key
  ``needs``;
* if all conditions of ``with`` hold and none of ``without`` (``dsframe.config.schema.conditions``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from dsframe.config.read.reader import keys
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.conditions import Row, holds, matches
from dsframe.text import table_of

_BY_DEEPSPEED = ("expert_parallel.autoep_size", "tensor_parallel.autotp_size", "sequence_parallel_size")
"""Features that engines with full replicas ignore."""


@cache
def table() -> Mapping[str, Any]:
    """Returns the content of ``table.json``."""
    content: Mapping[str, Any] = table_of(__file__)
    return content


def check(context: RuleContext) -> None:
    """Reports what the table says about the file."""
    for row in table()["rules"]:
        for key in row.get("keys") or (row["key"],):
            on = context.wrote(key) if row.get("written") else matches(context.file, key, row.get("is"))
            if on and _holds(context, row):
                _report(context, key, row)
    active = {name: _holds(context, row) for name, row in table()["conditions"].items()}
    for key, others in table()["excludes"].items():
        if matches(context.file, key) and (context.by_deepspeed or key not in _BY_DEEPSPEED):
            for name, description in others.items():
                if active[name]:
                    context.conflict(key, f"not possible with {description}", "remove one of them")


def _report(context: RuleContext, key: str, row: Row) -> None:
    code = row.get("code", "conflict")
    severity = row.get("severity", "warning" if code == "no-effect" else "error")
    remedy = row.get("write", "remove it")
    context.findings.add(severity, key, row["says"], remedy, code=code, at_value=code != "no-effect")


def _holds(context: RuleContext, row: Row) -> bool:
    supports, needs = row.get("supports"), row.get("needs")
    return (
        row.get("by_deepspeed") in (None, context.by_deepspeed)
        and (not supports or supports in context.entry.supports)
        and (not needs or context.wrote(needs))
        and not any(keys(path) in context.findings.pending for path in row.get("with", ()))  # not resolved yet
        and holds(context.file, row)
    )

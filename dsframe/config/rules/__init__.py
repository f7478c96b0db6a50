"""Rules about combinations of keys: those that make DeepSpeed raise, and keys without effect.

An error fails or silently trains something else. A warning is a key without effect, or a file only for dsframe.
"""

from __future__ import annotations

from importlib import import_module

from dsframe.config.rules import checkpoints, model, optimizer, parallel, system, table, training, zero
from dsframe.config.rules.context import RuleContext


def check(context: RuleContext) -> None:
    """Reports what is wrong with the combination of values."""
    for rules in (zero, parallel, training, optimizer, system, model, checkpoints, table):
        rules.check(context)
    if context.entry.rules:
        module, _, function = context.entry.rules.partition(":")
        getattr(import_module(module), function)(context)

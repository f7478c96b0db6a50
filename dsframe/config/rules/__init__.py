"""Rules about combinations of keys: those that make DeepSpeed raise, and keys without effect.

Each rule names the place in DeepSpeed 0.19.8 that raises or ignores. An error is something that fails or silently trains
something else; a warning is a key that does nothing, or a file that works only here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dsframe.config.read.findings import Findings
from dsframe.config.rules import checkpoints, experts, model, optimizer, parallel, report, system, training, zero
from dsframe.config.rules.context import RuleContext
from dsframe.config.schema.file import File


def check(
    file: File, raw: dict[str, Any], findings: Findings, engine: str | None = None, world_size: int | None = None
) -> None:
    """Report what is wrong with the combination of values. ``raw`` tells what was written; ``engine``: not the file's."""
    context = RuleContext(file, raw, findings, engine or file.dsframe.engine, world_size)
    zero.check(context)
    parallel.check_tensor(context)
    parallel.check_sequence(context)
    experts.check(context)
    training.check(context)
    optimizer.check(context)
    system.check(context)
    model.check(context)
    parallel.check_pipeline(context)
    checkpoints.check(context)
    report.check(context)
    if own := context.entry.rules:
        module, _, function = own.partition(":")
        getattr(import_module(module), function)(context)

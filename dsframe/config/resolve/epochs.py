"""Converts ``{"epochs": n}``, which may replace any number of steps, into steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from dsframe.config.read.findings import Findings, Resolved, dotted
from dsframe.config.read.reader import Path, Raw, inside
from dsframe.config.resolve.facts import Facts
from dsframe.config.schema.base import Epochs, Interval, Section
from dsframe.config.schema.file import File, children


def resolve(raw: Raw, facts: Facts, findings: Findings) -> None:
    """Replaces every ``{"epochs": n}`` of ``raw`` by steps in place, if the length of an epoch is known.

    An interval that is not a whole number of steps stays; :func:`due` tells at which steps it ends.
    """
    epoch_steps = facts.epoch_steps
    for path, unit, written in [*_epochs(File, raw, ())]:
        try:
            exact = steps(unit.model_validate(written), epoch_steps or Fraction(1))
        except ValidationError:  # validation reports it
            continue
        if "dsframe" not in raw:
            message, remedy = (
                "is dsframe's way to count steps: DeepSpeed raises",
                'write steps, or add a "dsframe" section',
            )
            findings.error(path, message, remedy, code="value", at_value=True)
        elif epoch_steps is not None:
            value, detail = math.ceil(exact), ", rounded up" if exact.denominator > 1 else ""
            if detail and issubclass(unit, Interval):
                value, detail = written, f": after steps {', '.join(map(str, first(exact)))}, ..."
            inside(raw, path[:-1])[path[-1]] = value
            findings.resolved.append(Resolved(path, value, _length(epoch_steps) + detail, written, detail))
        elif facts.total_steps is None:
            findings.pending.add(path)
        else:
            message = "the training data has no length, so an epoch has no number of steps"
            findings.error(path, message, "write steps", code="value", at_value=True)


def steps(written: int | Epochs, epoch_steps: Fraction) -> Fraction:
    """Returns the steps for a value of the file; 0.1 of an epoch is exactly a tenth."""
    return Fraction(written) if isinstance(written, int) else Fraction(str(written.epochs)) * epoch_steps


def due(step: int, every: Fraction) -> bool:
    """True if an interval of ``every`` steps ends within ``step``, counted from 1."""
    return step // every > (step - 1) // every


def first(every: Fraction, count: int = 3) -> list[int]:
    """Returns the steps in which the first ``count`` intervals end."""
    return sorted({math.ceil(number * every) for number in range(1, count + 1)})


def sentence(resolved: Sequence[Resolved], epoch_steps: Fraction | None) -> str:
    """Returns the replaced values for the start-up output; empty if the file has none."""
    parts = [_length(epoch_steps or Fraction(1))]
    for change in resolved:
        if isinstance(change.was, dict):
            became = f" is {change.value:,} steps" if isinstance(change.value, int) else ""
            parts.append(f"{dotted(change.path)} {json.dumps(change.was)}{became}{change.detail}")
    return "; ".join(parts) if parts[1:] else ""


def _epochs(owner: type[Section], raw: Raw, path: Path) -> Iterator[tuple[Path, type[Epochs], Any]]:
    for inner, section, value in children(owner, raw):
        if issubclass(section, Epochs):
            yield path + inner, section, value
        else:
            yield from _epochs(section, value, path + inner)


def _length(epoch_steps: Fraction) -> str:
    return f"an epoch has {float(epoch_steps):,.6g} step{'s' * (epoch_steps != 1)}"

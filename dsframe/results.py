"""What a training came to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dsframe.text import clock

Metrics = Mapping[str, float]
"""Numbers by name, such as those of an evaluation."""


def best_step(evaluations: Mapping[int, Mapping[str, float | None]], wanted: str) -> int | None:
    """Returns the step with the best finite value of ``wanted``, ``METRIC:min`` or ``METRIC:max``; of equal ones the first.

    ``evaluations``: by step. None where none has a finite value.
    """
    metric, _, direction = wanted.partition(":")
    sign = -1.0 if direction == "max" else 1.0
    rated = []
    for step, evaluation in evaluations.items():
        value = evaluation.get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            rated.append((sign * value, step))
    return min(rated)[1] if rated else None


@dataclass(frozen=True)
class Summary:
    """Results of a run."""

    steps: int
    seconds: float
    """From the first step to the end of the last, evaluation left out."""
    rate: float
    """Units (samples or tokens) a second over all ranks, the first step left out."""
    unit: str
    units_per_step: int
    """Of one global batch."""
    first_step_seconds: float
    """From the first step's start to its end: compilation and first reads are in it."""
    loss: float
    """Mean over the last step's global batch."""
    metrics: Mapping[str, float]
    """The last evaluation."""
    peak_memory_bytes: tuple[int, ...]
    """By rank: on a GPU what torch allocated at most, on a CPU the process's largest resident set."""
    skipped_steps: int
    """Updates left out because gradients were not finite."""
    stopped: str = ""
    """Why training ended before the last step of the file, where it did."""
    directory: str = ""
    """The run's directory. ``dsframe.load_model`` reads its newest checkpoint."""

    def __str__(self) -> str:
        figures = "".join(f"  {name} {value:.4f}" for name, value in self.metrics.items())
        return (
            f"{self.steps:,} steps in {clock(self.seconds)}  {self.rate:,.0f} {self.unit}/s"
            f"  last training loss {self.loss:.4f}"
            f"{'  evaluation:' + figures if figures else ''}  peak {max(self.peak_memory_bytes) / 2**20:,.0f} MiB a rank"
        )

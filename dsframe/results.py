"""Results of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dsframe.text import clock

Metrics = Mapping[str, float]
"""Numbers by name, such as those of an evaluation."""


def best_step(evaluations: Mapping[int, Mapping[str, float | None]], wanted: str) -> int | None:
    """Returns the step with the best finite value of ``wanted``, ``METRIC:min`` or ``METRIC:max``; the first of equals.

    ``evaluations``: by step. Returns None if no value is finite.
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
    """Time from the first step to the end of the last, without evaluation."""
    rate: float
    """Units (samples or tokens) per second over all ranks, without the first step."""
    unit: str
    units_per_step: int
    """Units of one global batch."""
    first_step_seconds: float
    """Duration of the first step, with compilation and first reads."""
    loss: float
    """Mean over the last step's global batch."""
    metrics: Mapping[str, float]
    """Metrics of the last evaluation."""
    peak_memory_bytes: tuple[int, ...]
    """Peak of each rank: on a GPU what torch allocated, on a CPU the process's largest resident set."""
    skipped_steps: int
    """Number of updates skipped because gradients were not finite."""
    stopped: str = ""
    """Reason why training ended before the file's last step, else empty."""
    directory: str = ""
    """The run's directory. ``dsframe.load_model`` reads its newest checkpoint."""

    def __str__(self) -> str:
        figures = "".join(f"  {name} {value:.4f}" for name, value in self.metrics.items())
        return (
            f"{self.steps:,} steps in {clock(self.seconds)}  {self.rate:,.0f} {self.unit}/s"
            f"  last training loss {self.loss:.4f}"
            f"{'  evaluation:' + figures if figures else ''}  peak {max(self.peak_memory_bytes) / 2**20:,.0f} MiB a rank"
        )

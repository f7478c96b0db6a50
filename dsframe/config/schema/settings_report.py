"""The ``dsframe.profile`` section."""
# ruff: noqa: RUF012 - pydantic copies mutable defaults

from typing import Literal

from dsframe.config.schema.base import Count, Section, Size


class Profile(Section):
    """Traces of torch's profiler: files for https://ui.perfetto.dev or chrome://tracing, and tables of the slowest
    operations, in the folder ``profile`` of the run directory. Steps are counted from the first step of the process."""

    wait: Size = 1
    """Steps to skip first."""
    warmup: Size = 1
    """Steps to profile and discard."""
    active: Count = 3
    """Steps in one trace."""
    repeat: Count = 1
    """Number of traces, each after ``wait`` and ``warmup``."""
    ranks: Literal["all"] | list[Size] = [0]
    """Ranks to profile."""
    memory: bool = False
    """Record allocations."""
    shapes: bool = False
    """Record shapes of operands."""
    stacks: bool = False
    """Record Python call stacks. Slow."""

    @property
    def steps(self) -> int:
        """Number of steps that all traces take."""
        return (self.wait + self.warmup + self.active) * self.repeat

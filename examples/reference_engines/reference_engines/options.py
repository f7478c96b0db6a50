"""What a file may write under ``engine_options`` for these engines. dsframe checks it like its own keys."""

# No `from __future__ import annotations`: pydantic would evaluate each annotation from its text.

from dsframe.config.schema.base import Count, Section


class ParameterAveraging(Section):
    """Options of "reference-parameter-averaging"."""

    every_steps: Count = 1
    """Optimizer steps between two averages of the ranks' weights."""

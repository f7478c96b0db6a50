"""The ``dsframe.checkpoints`` section."""

from typing import Annotated

from pydantic import Field

from dsframe.config.schema.base import Count, Every, Section


class Checkpoints(Section):
    """When the run saves its state, and what it keeps."""

    every_steps: Every | None = None
    """Steps between two checkpoints. Default: only at the end, and when a signal stops the run."""
    at_end: bool = True
    """Save after the last step."""
    asynchronous: bool = False
    """Copy the state and write it while training goes on, instead of waiting. Each rank holds its share of the state once more in
    host memory meanwhile: with Adam 12 bytes times parameters divided by ranks."""
    keep_last: Count = 2
    """So many of the newest checkpoints stay."""
    keep_best: Annotated[str, Field(pattern=r"^[^:\s]+:(min|max)$")] | None = None
    """Keep also the best by this metric of the evaluation: ``loss:min`` or ``accuracy:max``."""
    keep_every: Every | None = None
    """Keep also those at multiples of so many steps."""

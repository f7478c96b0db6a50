"""The ``dsframe.checkpoints`` section."""

from typing import Annotated, Literal

from pydantic import Field

from dsframe.config.schema.base import Count, Every, Section

METRIC = r"^[^:\s]+:(min|max)$"
"""A metric of the evaluation, and whether lower or higher is better."""


class Checkpoints(Section):
    """When the run saves its state, and what it keeps."""

    every_steps: Every | None = None
    """Steps between two checkpoints. Default: only at the end, and when a signal stops the run."""
    at_end: bool = True
    """Save after the last step."""
    asynchronous: bool = False
    """Copy the state, then write it to disk while training continues. Each rank keeps a second copy of its shard of the
    state in host memory during the run: with Adam 12 bytes times parameters divided by ranks."""
    form: Literal["portable", "sharded"] | None = None
    """No effect: there is one form, which all ranks write together. Accepted for one more release."""
    keep_last: Count = 2
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[str, Field(pattern=METRIC)] | None = None
    """Also keep the best checkpoint by this validation metric: ``loss:min`` or ``accuracy:max``."""
    keep_every: Every | None = None
    """Also keep every checkpoint at a multiple of this number of steps."""

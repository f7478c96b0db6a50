"""What these engines hold, send and wait for, where that is not what DDP does: for ``dsframe plan``. Imports nothing heavy."""

from __future__ import annotations

from dsframe.engines.costs import Costs, Overlap


class AfterBackward(Costs):
    """Gradients, or weights, are sent when the backward pass has ended: nothing hides it."""

    def overlap(self, width: int) -> Overlap:
        """None."""
        return "none"


class ModelParallel(AfterBackward):
    """Each rank holds one of ``pipeline.stages`` parts of the model."""

    @property
    def model_ranks(self) -> int:
        """One for each stage."""
        return self.file.pipeline.stages

"""The ``dsframe.model`` section."""

from typing import Annotated, Literal

from pydantic import Field

from dsframe.config.schema.base import Count, Section


class Recomputation(Section):
    """Selects the modules to recompute, if not all blocks of the model."""

    modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of classes, or of modules with ``*`` as a wildcard: ``["*.self_attn"]``. Default: the repeated block."""
    every: Count = 1
    """Every n-th of them, starting with the first."""


class Model(Section):
    """Changes to the model before training. None of them renames a parameter or changes the result."""

    activation_checkpointing: bool | list[str] | Recomputation = False
    """Gradient checkpointing: keep only the inputs of blocks and recompute the rest; less memory, about a third more
    compute. True selects the block that the model repeats, a list classes or modules (``*`` is a wildcard), and an
    object some of them."""

    @property
    def recomputation(self) -> Recomputation | None:
        """The modules to recompute; None if none."""
        chosen = self.activation_checkpointing
        if isinstance(chosen, Recomputation):
            return chosen
        if isinstance(chosen, list):
            return Recomputation.model_construct(modules=chosen, every=1)
        return Recomputation() if chosen else None

    channels_last: bool = False
    """Use torch's channels_last memory format for 2-D convolutions."""
    keep_in_fp32: list[str] = Field(default_factory=list)
    """Parameters that stay in fp32 under ``bf16`` and ``fp16``, as routers and norms need it, with ``*`` as a wildcard:
    ``["*norm*", "*.router.*"]``. A module with only such parameters computes in fp32, and converts its inputs and
    outputs. Refused by DeepSpeed, which converts all parameters."""
    sync_batch_norm: bool = False
    """BatchNorm uses the samples of all ranks, so the result does not depend on the number of processes. Refused with
    gradient accumulation, recomputed blocks, a compiled model, and where ranks split a model or its samples."""
    compile: bool | Literal["blocks"] = False
    """torch.compile: the whole model, or each repeated block separately."""

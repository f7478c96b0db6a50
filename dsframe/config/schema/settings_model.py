"""Parts of the ``dsframe`` section about the model, the rates for its batch, and what DeepSpeed has no keys for."""

from typing import Annotated, Literal

from pydantic import Field

from dsframe.config.schema.base import Count, Section


class Recomputation(Section):
    """Which modules keep their inputs alone, where not all of the model's blocks shall."""

    modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of classes, or of modules with ``*`` as a wildcard: ``["*.self_attn"]``. Default: the repeated block."""
    every: Count = 1
    """Every n-th of them, starting with the first."""


class Model(Section):
    """What is done to the model before it trains. None of it changes a parameter's name, or what is computed."""

    activation_checkpointing: bool | list[str] | Recomputation = False
    """Gradient checkpointing: keep only the inputs of blocks and recompute the rest; less memory, about a third more
    work. True is the block that the model repeats; or names of classes or modules (``*`` stands for anything); or
    these and which of them."""

    @property
    def recomputation(self) -> Recomputation | None:
        """Which modules are recomputed; None: none."""
        chosen = self.activation_checkpointing
        if isinstance(chosen, Recomputation):
            return chosen
        if isinstance(chosen, list):
            return Recomputation.model_construct(modules=chosen, every=1)
        return Recomputation() if chosen else None

    channels_last: bool = False
    """Use torch's channels_last memory format for 2-D convolutions."""
    keep_in_fp32: list[str] = Field(default_factory=list)
    """Names of parameters that stay in fp32 under ``bf16`` and ``fp16``, as routers and norms need it; ``*`` stands for anything:
    ``["*norm*", "*.router.*"]``. A module of which all is kept computes in fp32: its inputs are converted, and its outputs
    back. Refused by DeepSpeed, which converts all parameters."""
    sync_batch_norm: bool = False
    """BatchNorm uses the samples of all ranks, so the result does not depend on the number of processes. Refused with several
    micro-batches in a step, with recomputed blocks, a compiled model, and where ranks split a model or its samples."""
    compile: bool | Literal["blocks"] = False
    """torch.compile: the whole model, or each repeated block by itself."""

"""Parts of the ``dsframe`` section about the model, the rates for its batch, and what DeepSpeed has no keys for."""

from typing import Literal

from dsframe.config.schema.base import Count, Section, StepsOrNone


class Tiling(Section):
    """Linear layers cut into tiles, each a parameter of its own, so that ZeRO-3 never holds a whole one."""

    modules: list[str]
    """Names of linear layers; ``*`` stands for anything: ``*.expand``."""
    in_splits: Count = 1
    """Cuts along the inputs."""
    out_splits: Count = 1
    """Cuts along the outputs."""


class Model(Section):
    """What is done to the model before it trains. None of it changes a parameter's name, or what is computed."""

    activation_checkpointing: bool | list[str] = False
    """Keep the inputs of blocks and compute the rest again: less memory, about a third more work. True is the block that
    the model repeats; or class names."""
    tiling: Tiling | None = None
    """Cut large linear layers, at ZeRO stage 3."""
    channels_last: bool = False
    """Channels innermost in the activations of 2-D convolutions."""
    sync_batch_norm: bool = False
    """BatchNorm uses the samples of all ranks, so that the training does not depend on how many there are. Refused with several
    micro-batches in a step, with recomputed blocks, a compiled model, and where ranks split a model or its samples."""
    compile: bool | Literal["blocks"] = False
    """torch.compile: the whole model, or each repeated block by itself."""


class LargeBatch(Section):
    """Learning rates for another batch size than the one they were found for. Nothing is scaled unless this asks for it."""

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply every rate of the optimizer and the schedule by the batch's ratio to ``reference_batch_size``, or by its
    square root."""
    reference_batch_size: Count | None = None
    """``train_batch_size`` for which the file's rates were found."""
    warmup_steps: StepsOrNone = 0
    """Steps over which that factor grows from 1, on top of what the schedule does."""


class DeepSpeedEngine(Section):
    """Options of the DeepSpeed engine that are no keys of DeepSpeed's."""

    accumulate: Literal["shards", "whole"] = "shards"
    """Gradients between micro-batches at ZeRO stages 2 and 3: reduced each time and kept in ``shards``, as DeepSpeed does
    it, or ``whole`` on every rank and reduced once in a step: more memory, less is sent, and in 16 bits the sum of the
    micro-batches is rounded to them."""

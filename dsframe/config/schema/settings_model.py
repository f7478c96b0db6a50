"""Parts of the ``dsframe`` section about the model, the rates for its batch, and what DeepSpeed has no keys for."""

from typing import Annotated, Any, Literal

from pydantic import Field

from dsframe.config.schema.base import Count, NonNegative, Positive, Section, StepsOrNone
from dsframe.config.schema.settings_checkpoints import METRIC


class Tiling(Section):
    """Linear layers cut into tiles, each a parameter of its own, so that ZeRO-3 never holds a whole one."""

    modules: list[str]
    """Names of linear layers; ``*`` stands for anything: ``*.expand``."""
    in_splits: Count = 1
    """Cuts along the inputs."""
    out_splits: Count = 1
    """Cuts along the outputs."""


class Recomputation(Section):
    """Which modules keep their inputs alone, where not all of the model's blocks shall."""

    modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of classes, or of modules, in which ``*`` stands for anything: ``["*.self_attn"]``. Default: the block that the model
    repeats."""
    every: Count = 1
    """Of these the first, and then every so manieth in the model's order."""


class Model(Section):
    """What is done to the model before it trains. None of it changes a parameter's name, or what is computed."""

    activation_checkpointing: bool | list[str] | Recomputation = False
    """Keep the inputs of blocks and compute the rest again: less memory, about a third more work. True is the block that
    the model repeats; or names of classes or modules (``*`` stands for anything); or these and which of them."""
    offload_activations: bool | list[str] = False
    """What blocks keep for the backward pass waits in the host's memory. Names as for ``activation_checkpointing``. Nothing
    changes where the host's memory is the device's. Refused with ``activation_checkpointing``, which has
    ``cpu_checkpointing``, and with ``compile``."""

    @property
    def recomputation(self) -> Recomputation | None:
        """Which modules are recomputed; None: none."""
        chosen = self.activation_checkpointing
        if isinstance(chosen, Recomputation):
            return chosen
        if isinstance(chosen, list):
            return Recomputation.model_construct(modules=chosen, every=1)
        return Recomputation() if chosen else None

    loss_chunk_tokens: Count | Literal["auto"] | None = None
    """A language model's loss is computed so many tokens at a time, without the logits of all of them: with a large vocabulary
    those take the most memory of a step. ``"auto"``: slices of 128 MiB. Default: all at once. Refused in a pipeline, with
    ``"compile": true``, and for models that change their output layer's logits."""
    tiling: Tiling | None = None
    """Cut large linear layers, at ZeRO stage 3."""
    channels_last: bool = False
    """Channels innermost in the activations of 2-D convolutions."""
    sync_batch_norm: bool = False
    """BatchNorm uses the samples of all ranks, so that the training does not depend on how many there are. Refused with several
    micro-batches in a step, with recomputed blocks, a compiled model, and where ranks split a model or its samples."""
    compile: bool | Literal["blocks"] = False
    """torch.compile: the whole model, or each repeated block by itself. ``"auto"``: each repeated block, in trainings of at least
    1,000 steps on GPUs; else nothing."""


class ParameterGroup(Section):
    """Parameters of the model, by name, and what is different for them."""

    match: Annotated[list[str], Field(min_length=1)]
    """Names of parameters; ``*`` stands for anything: ``*.bias``. Each must match something."""
    weight_decay: NonNegative | None = None
    """Their weight decay. Default: as ``no_decay`` says, else the optimizer's."""
    lr_scale: Positive | None = None
    """Factor of the schedule's rate for them, at each step."""
    freeze: bool = False
    """Train none of them."""

    @property
    def contradiction(self) -> tuple[str, str] | None:
        """What is wrong with the group by itself, and the remedy."""
        given = [key for key in ("weight_decay", "lr_scale") if getattr(self, key) is not None]
        if self.freeze and given:
            return f"{given[0]} has no effect on frozen parameters", "keep one of them"
        return None if self.freeze or given else ("changes nothing", "add weight_decay, lr_scale or freeze")


class Adapter(Section):
    """A few new weights that are trained beside the model's own, which are frozen and in no checkpoint. By the library peft,
    whose names these keys have."""

    type: Literal["lora"] = "lora"
    """``lora``: two narrow matrices beside a layer, whose product is added to its weight (Hu et al. 2021, arXiv 2106.09685)."""
    r: Count | None = None
    """Width of the narrow matrices. Default: 8."""
    lora_alpha: Positive | None = None
    """The product counts ``lora_alpha / r`` times. Default: 8."""
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Share of the layer's inputs that the adapter does not see. Default: 0."""
    use_rslora: bool | None = None
    """Divide by the square root of ``r`` instead of ``r``. Default: false."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] | None = None
    """Layers that get one, by the end of their names: ``["q_proj", "v_proj"]``. Default: ``all-linear``, all but the one that
    gives a transformers model's logits."""
    modules_to_save: Annotated[list[str], Field(min_length=1)] | None = None
    """Modules that are trained whole, by the end of their names, such as a new head."""
    base_format: Literal["nf4", "fp4"] | None = None
    """Keep the frozen linear layers, but the one that gives logits, in 4 bits, by the library bitsandbytes (QLoRA, arXiv
    2305.14314): ``nf4`` has normally distributed levels, ``fp4`` those of a 4-bit float. Default: as the training's. Not where
    parameters are sharded (ZeRO-3, FSDP)."""
    folder: str | None = None
    """Folder of an adapter that peft has written, or ``dsframe export --to peft``: its training goes on from there. It says all
    that the other keys say."""

    def peft(self) -> dict[str, Any]:
        """Arguments of peft's ``LoraConfig``."""
        given = self.model_dump(exclude_none=True, exclude={"type", "folder", "base_format"})
        return {"target_modules": "all-linear", **given}


class Stop(Section):
    """When training ends before its last step."""

    metric: Annotated[str, Field(pattern=METRIC)]
    """A metric of the evaluation, and what is better: ``loss:min`` or ``accuracy:max``."""
    patience: Count = 3
    """So many evaluations one after the other without a better value end the training. What counts are those at
    ``eval_every_steps``."""
    min_delta: NonNegative = 0.0
    """A value is better only by more than this."""


class Ema(Section):
    """An exponential moving average of the weights, kept beside them and in checkpoints. It takes as much memory as
    the fp32 weights of a rank."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """The share of the old average that stays at each update."""
    every_steps: Count = 1
    """Steps between two updates of the average. The first one takes the weights."""
    evaluate: bool = False
    """Evaluate the average instead of the weights."""


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

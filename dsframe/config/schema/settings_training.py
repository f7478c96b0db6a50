"""Sections of ``dsframe`` for parameter groups, adapters, early stopping and weight averaging."""

from typing import Annotated, Any, Literal

from pydantic import Field

from dsframe.config.schema.base import Count, NonNegative, Positive, Section
from dsframe.config.schema.settings_checkpoints import METRIC


class ParameterGroup(Section):
    """Parameters, by name, that are trained differently."""

    match: Annotated[list[str], Field(min_length=1)]
    """Parameter names, with ``*`` as a wildcard: ``*.bias``. Each must match something."""
    weight_decay: NonNegative | None = None
    """Weight decay. Default: by ``no_decay``, else the optimizer's."""
    lr_scale: Positive | None = None
    """Factor of the scheduled learning rate."""
    freeze: bool = False
    """Do not train them."""

    @property
    def contradiction(self) -> tuple[str, str] | None:
        """What is wrong with the group itself, and the remedy."""
        given = [key for key in ("weight_decay", "lr_scale") if getattr(self, key) is not None]
        if self.freeze and given:
            return f"{given[0]} has no effect on frozen parameters", "keep one of them"
        return None if self.freeze or given else ("changes nothing", "add weight_decay, lr_scale or freeze")


class Adapter(Section):
    """Small new weights that are trained while the model's own stay frozen, and are not in checkpoints. Uses the
    library peft, with its names of keys."""

    type: Literal["lora"] = "lora"
    """``lora``: two narrow matrices per layer, whose product is added to its weight (Hu et al., arXiv 2106.09685)."""
    r: Count | None = None
    """Rank of the narrow matrices. Default: 8."""
    lora_alpha: Positive | None = None
    """The product is scaled by ``lora_alpha / r``. Default: 8."""
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Dropout of the adapter's inputs. Default: 0."""
    use_rslora: bool | None = None
    """Scale by ``lora_alpha`` divided by the square root of ``r``. Default: false."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] | None = None
    """Layers with an adapter, by the end of their names: ``["q_proj", "v_proj"]``. Default: ``all-linear``, all linear
    layers except the output layer of a transformers model."""
    modules_to_save: Annotated[list[str], Field(min_length=1)] | None = None
    """Modules to train without an adapter, by the end of their names, such as a new head."""
    base_format: Literal["nf4", "fp4"] | None = None
    """Store the frozen linear layers, except the output layer, in 4 bits with the library bitsandbytes (QLoRA, arXiv
    2305.14314): ``nf4`` has normally distributed levels, ``fp4`` those of a 4-bit float. Default: unchanged. Not
    possible if parameters are sharded (ZeRO-3, FSDP)."""
    folder: str | None = None
    """Folder of an adapter to continue training, by peft or ``dsframe export --to peft``. It replaces the other
    keys."""

    def peft(self) -> dict[str, Any]:
        """Returns arguments for peft's ``LoraConfig``."""
        given = self.model_dump(exclude_none=True, exclude={"type", "folder", "base_format"})
        return {"target_modules": "all-linear", **given}


class Stop(Section):
    """Early stopping."""

    metric: Annotated[str, Field(pattern=METRIC)]
    """A metric of the evaluation, and whether lower or higher is better: ``loss:min`` or ``accuracy:max``."""
    patience: Count = 3
    """Evaluations in a row without improvement before training ends. Only evaluations at ``eval_every_steps`` count."""
    min_delta: NonNegative = 0.0
    """Smallest change that counts as an improvement."""


class Ema(Section):
    """Exponential moving average of the weights, kept in memory and checkpoints: as much memory as a rank's fp32
    weights."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Factor of the old average at each update."""
    every_steps: Count = 1
    """Steps between two updates of the average. The first update copies the weights."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """Step at which averaging starts; before it the average equals the weights."""
    warmup_gamma: Annotated[float, Field(gt=0.0)] | None = None
    """Makes the decay grow at step ``n`` of averaging: ``1 - (1 + n / warmup_gamma) ** -warmup_power``, up to
    ``decay``."""
    warmup_power: Annotated[float, Field(gt=0.0)] = 2 / 3
    """See ``warmup_gamma``. 2/3 suits trainings of a million steps, 3/4 shorter ones."""
    evaluate: bool = False
    """Evaluate the average instead of the weights; commands and ``load_model`` then use it too."""

    def decay_at(self, step: int) -> float:
        """Returns the factor of the old average at ``step``, counted from 1."""
        since = step - self.start_step
        if since <= 0:
            return 0.0
        if self.warmup_gamma is None:
            return self.decay
        return min(self.decay, 1.0 - float((1.0 + since / self.warmup_gamma) ** -self.warmup_power))

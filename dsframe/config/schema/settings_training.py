"""Sections of the ``dsframe`` section about parameters and the end of a training, which few files have."""

from typing import Annotated, Any, Literal

from pydantic import Field

from dsframe.config.schema.base import Count, NonNegative, Positive, Section
from dsframe.config.schema.settings_checkpoints import METRIC


class ParameterGroup(Section):
    """Parameters of the model, by name, and what is different for them."""

    match: Annotated[list[str], Field(min_length=1)]
    """Names of parameters, with ``*`` as a wildcard: ``*.bias``. Each must match something."""
    weight_decay: NonNegative | None = None
    """Their weight decay. Default: as ``no_decay`` says, else the optimizer's."""
    lr_scale: Positive | None = None
    """Factor of the scheduled learning rate, at each step."""
    freeze: bool = False
    """Do not train them."""

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
    """``lora``: two narrow matrices for a layer, whose product is added to its weight (Hu et al. 2021, arXiv 2106.09685)."""
    r: Count | None = None
    """Width of the narrow matrices. Default: 8."""
    lora_alpha: Positive | None = None
    """The product counts ``lora_alpha / r`` times. Default: 8."""
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Dropout of the adapter's inputs. Default: 0."""
    use_rslora: bool | None = None
    """Divide by the square root of ``r`` instead of ``r``. Default: false."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] | None = None
    """Layers with an adapter, by the end of their names: ``["q_proj", "v_proj"]``. Default: ``all-linear``, all
    linear layers but the output layer of a transformers model."""
    modules_to_save: Annotated[list[str], Field(min_length=1)] | None = None
    """Modules to train without an adapter, by the end of their names, such as a new head."""
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
    """Number of evaluations in a row without improvement that end the training. What counts are those at
    ``eval_every_steps``."""
    min_delta: NonNegative = 0.0
    """Smallest change that counts as an improvement."""


class Ema(Section):
    """An exponential moving average of the weights, kept beside them and in checkpoints. It takes as much memory as
    the fp32 weights of a rank."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Factor of the old average at each update."""
    every_steps: Count = 1
    """Steps between two updates of the average. The first one takes the weights."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """Step at which averaging starts; until then the average equals the weights."""
    warmup_gamma: Annotated[float, Field(gt=0.0)] | None = None
    """Makes the decay grow: ``1 - (1 + n / warmup_gamma) ** -warmup_power`` at step ``n`` after ``start_step``, up to ``decay``."""
    warmup_power: Annotated[float, Field(gt=0.0)] = 2 / 3
    """See ``warmup_gamma``. 2/3 is for trainings of a million steps, 3/4 for shorter ones."""
    evaluate: bool = False
    """Evaluate the average instead of the weights; commands and ``load_model`` then take it, too."""

    def decay_at(self, step: int) -> float:
        """The share that stays at ``step``, from 1."""
        since = step - self.start_step
        if since <= 0:
            return 0.0
        if self.warmup_gamma is None:
            return self.decay
        return min(self.decay, 1.0 - float((1.0 + since / self.warmup_gamma) ** -self.warmup_power))

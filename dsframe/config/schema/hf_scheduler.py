"""``scheduler.params`` for the names of Hugging Face's Trainer (``lr_scheduler_type``) and for nanoGPT's recipe.

Source: transformers 5.23, ``optimization.py``. The rate of the first update is the factor at 0, as there.
"""

from typing import Annotated, Literal

from pydantic import Field

from dsframe.config.schema.base import Count, NonNegative, Real, Section, Size, Steps, StepsOrNone


class HfConstantParams(Section):
    """Hugging Face: the optimizer's rate."""


class HfConstantWithWarmupParams(Section):
    """Hugging Face: a straight line from 0, then the optimizer's rate."""

    num_warmup_steps: StepsOrNone = 0
    """Steps of warm-up."""


class HfLinearParams(HfConstantWithWarmupParams):
    """Hugging Face: warm-up, then a straight line to 0."""

    num_training_steps: Steps
    """Steps until the end. Required; ``"auto"`` is the whole training."""


class HfCosineParams(HfLinearParams):
    """Hugging Face: warm-up, then a cosine."""

    num_cycles: NonNegative = 0.5
    """Waves; 0.5 goes down to 0 once."""


class HfCosineWithRestartsParams(HfLinearParams):
    """Hugging Face: warm-up, then cosines down to 0, each starting anew."""

    num_cycles: Count = 1
    """How many."""


class HfCosineWithMinLrParams(HfCosineParams):
    """Hugging Face: warm-up, then a cosine down to a rate above 0."""

    min_lr: NonNegative | None = None
    """Last rate. This or ``min_lr_rate``."""
    min_lr_rate: NonNegative | None = None
    """Last rate as a ratio of the optimizer's."""


class HfPolynomialParams(HfLinearParams):
    """Hugging Face: warm-up, then a polynomial down to ``lr_end``."""

    lr_end: NonNegative = 1e-7
    """Last rate."""
    power: Real = 1.0
    """Power of the polynomial."""


class HfWarmupStableDecayParams(Section):
    """Hugging Face: warm-up, a constant rate, then down."""

    num_warmup_steps: StepsOrNone
    """Steps of warm-up. Required."""
    num_decay_steps: Steps
    """Steps down, at the end. Required."""
    num_training_steps: Steps
    """Steps until the end. Required; ``"auto"`` is the whole training."""
    warmup_type: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Shape of the way up."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "cosine"
    """Shape of the way down."""
    min_lr_ratio: NonNegative = 0.0
    """First and last rate as a ratio of the optimizer's."""
    num_cycles: NonNegative = 0.5
    """Waves of a cosine."""


class NanoGptParams(Section):
    """nanoGPT: a warm-up that does not begin at 0, then a cosine down to ``min_lr``, which stays."""

    warmup_iters: StepsOrNone = 0
    """Steps of warm-up."""
    lr_decay_iters: Steps
    """Steps until the lowest rate. Required; ``"auto"`` is the whole training."""
    min_lr: NonNegative
    """Lowest rate. Required."""


class PlateauParams(Section):
    """torch's ReduceLROnPlateau: the rate falls where a metric of the evaluation no longer gets better."""

    metric: str = "loss"
    """Name of the metric, as an evaluation prints it."""
    mode: Literal["min", "max"] = "min"
    """Whether less is better, or more."""
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Factor of the rate."""
    patience: Size = 10
    """Evaluations without a better value that are waited for."""
    threshold: NonNegative = 1e-4
    """By how much a value has to be better."""
    threshold_mode: Literal["rel", "abs"] = "rel"
    """Whether that is a share of the best value or a difference."""
    cooldown: Size = 0
    """Evaluations after a fall that do not count."""
    min_lr: NonNegative = 0.0
    """Lowest rate."""
    eps: NonNegative = 1e-8
    """Falls by less than this are left out."""


"""Names that dsframe knows and DeepSpeed does not: for files with a "dsframe" section."""

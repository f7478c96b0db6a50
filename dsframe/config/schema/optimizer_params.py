# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""``optimizer.params``: what most optimizers take, and Adam's, which most files have. Sources: as for ``optimizer``."""

from typing import Annotated

from pydantic import Field

from dsframe.config.schema.base import NonNegative, Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Betas = Annotated[list[Beta], Field(min_length=2, max_length=2)]


class Params(Section):
    """What every optimizer takes."""

    lr: NonNegative = 1e-3
    """Learning rate: the step size before the scheduler changes it. ``"auto"`` is 5e-5, as in Hugging Face's Trainer."""
    weight_decay: NonNegative = 0.0
    """Decay of the weights. ``"auto"`` is 0."""


class TorchParams(Params):
    """What most optimizers of torch take too."""

    foreach: bool | None = None
    """torch: update many tensors with one call. Default: torch decides."""
    maximize: bool = False
    """torch: go up the gradient, not down."""
    differentiable: bool = False
    """torch: let gradients flow through the step."""
    capturable: bool = False
    """torch: safe inside a CUDA graph."""


class AdamParams(TorchParams):
    """Adam and AdamW. DeepSpeed takes both as AdamW unless ``type`` is Adam and ``adam_w_mode`` is false."""

    betas: Betas = [0.9, 0.999]
    """Decay of the two moments, each in [0, 1)."""
    eps: NonNegative = 1e-8
    """Added to the denominator."""
    bias_correction: bool = True
    """Correct the moments for their start at zero."""
    amsgrad: bool = False
    """The AMSGrad variant. Only with ``torch_adam``: DeepSpeed's own kernel raises."""
    adam_w_mode: bool = True
    """For ``type`` Adam: true is decoupled weight decay (AdamW), false is L2 regularisation."""
    torch_adam: bool = False
    """Use torch's Adam: no kernel is compiled."""
    fp32_optimizer_states: bool = True
    """DeepSpeed's CPU Adam: keep the moments in fp32."""
    set_grad_none: bool = True
    """DeepSpeed's FusedAdam: drop gradients rather than fill them with zeros."""
    fused: bool | None = None
    """torch: the fused kernel. With ``torch_adam``."""

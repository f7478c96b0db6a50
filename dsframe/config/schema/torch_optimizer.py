# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""``optimizer.params`` for the classes of ``torch.optim``. Source: torch 2.13."""

from typing import Annotated, Literal

from pydantic import Field

from dsframe.config.schema.base import Count, NonNegative, Real, Section
from dsframe.config.schema.optimizer_params import Betas, Params, TorchParams


class SgdParams(Params):
    """torch's SGD."""

    momentum: NonNegative = 0.0
    """Momentum factor."""
    dampening: NonNegative = 0.0
    """Dampening of the momentum."""
    nesterov: bool = False
    """Nesterov momentum. Needs momentum above 0 and dampening 0."""
    maximize: bool = False
    """Go up the gradient, not down."""
    foreach: bool | None = None
    """Update many tensors with one call."""
    differentiable: bool = False
    """Let gradients flow through the step."""
    fused: bool | None = None
    """The fused kernel."""


class RmspropParams(TorchParams):
    """torch's RMSprop."""

    lr: NonNegative = 0.01
    """Learning rate."""
    alpha: NonNegative = 0.99
    """Smoothing constant."""
    eps: NonNegative = 1e-8
    """Added to the denominator."""
    momentum: NonNegative = 0.0
    """Momentum factor."""
    centered: bool = False
    """Normalise by the variance."""


class AdamaxParams(TorchParams):
    """torch's Adamax."""

    lr: NonNegative = 2e-3
    """Learning rate."""
    betas: Betas = [0.9, 0.999]
    """Decay of the moments."""
    eps: NonNegative = 1e-8
    """Added to the denominator."""


class NadamParams(AdamaxParams):
    """torch's NAdam."""

    momentum_decay: NonNegative = 0.004
    """Decay of the momentum."""
    decoupled_weight_decay: bool = False
    """As in AdamW."""


class RadamParams(AdamaxParams):
    """torch's RAdam."""

    lr: NonNegative = 1e-3
    """Learning rate."""
    decoupled_weight_decay: bool = False
    """As in AdamW."""


class AdadeltaParams(TorchParams):
    """torch's Adadelta."""

    lr: NonNegative = 1.0
    """Factor of the steps, which have a size of their own."""
    rho: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9
    """Decay of the squared gradients."""
    eps: NonNegative = 1e-6
    """Added to the denominator."""


class AsgdParams(TorchParams):
    """torch's averaged SGD."""

    lr: NonNegative = 0.01
    """Learning rate."""
    lambd: Real = 1e-4
    """Decay term."""
    alpha: Real = 0.75
    """Power of the learning rate's update."""
    t0: Real = 1e6
    """Step at which averaging starts."""


class RpropParams(Section):
    """torch's Rprop."""

    lr: NonNegative = 0.01
    """First step size."""
    etas: Annotated[list[Real], Field(min_length=2, max_length=2)] = [0.5, 1.2]
    """Factors of decrease and increase."""
    step_sizes: Annotated[list[Real], Field(min_length=2, max_length=2)] = [1e-6, 50.0]
    """Smallest and largest step."""
    foreach: bool | None = None
    """Update many tensors with one call."""
    maximize: bool = False
    """Go up the gradient, not down."""
    differentiable: bool = False
    """Let gradients flow through the step."""
    capturable: bool = False
    """Safe inside a CUDA graph."""


class AdafactorParams(Section):
    """torch's Adafactor."""

    lr: NonNegative = 0.01
    """Learning rate."""
    beta2_decay: Real = -0.8
    """Decay rate of beta2."""
    eps: Annotated[list[Real | None], Field(min_length=2, max_length=2)] = [None, 1e-3]
    """Two stabilisers."""
    d: Count | Real = 1.0
    """Clipping threshold of an update."""
    weight_decay: NonNegative = 0.0
    """Decay of the weights."""
    foreach: bool | None = None
    """Update many tensors with one call."""
    maximize: bool = False
    """Go up the gradient, not down."""


class LbfgsParams(Section):
    """torch's L-BFGS, which evaluates a step's batch several times; on engines of full replicas."""

    lr: NonNegative = 1.0
    """Length of a step, or the first one that the line search tries."""
    max_iter: Count = 20
    """Iterations in one step, at most."""
    max_eval: Count | None = None
    """Evaluations of the loss in one step, at most. Default: 1.25 times ``max_iter``."""
    tolerance_grad: NonNegative = 1e-7
    """The step ends where no gradient is larger."""
    tolerance_change: NonNegative = 1e-9
    """The step ends where loss and weights change by less."""
    history_size: Count = 100
    """Number of earlier updates that are kept: two numbers for each weight and update."""
    line_search_fn: Literal["strong_wolfe"] | None = None
    """Search along the line."""

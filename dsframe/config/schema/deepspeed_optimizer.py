# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""``optimizer.params`` for DeepSpeed's own optimizers but Adam, and for those of the user's. Sources: as for ``optimizer``."""

from typing import ClassVar

from dsframe.config.schema.base import NonNegative, Real, Section
from dsframe.config.schema.optimizer_params import Beta, Betas, Params, TorchParams


class LambParams(Params):
    """LAMB, DeepSpeed's kernel. CUDA, and dynamic loss scaling, only."""

    betas: Betas = [0.9, 0.999]
    """Decay of the two moments."""
    eps: NonNegative = 1e-8
    """Added to the denominator."""
    bias_correction: bool = True
    """Correct the moments for their start at zero."""
    eps_inside_sqrt: bool = False
    """Add ``eps`` under the square root."""
    max_coeff: Real = 10.0
    """Largest trust ratio."""
    min_coeff: Real = 0.01
    """Smallest trust ratio."""
    amsgrad: bool = False
    """Not supported: true raises."""


class LionParams(Params):
    """Lion, DeepSpeed's kernel."""

    betas: Betas = [0.9, 0.999]
    """Decay of the update and of the momentum."""
    set_grad_none: bool = True
    """Drop gradients rather than fill them with zeros."""
    fp32_optimizer_states: bool = True
    """With CPU offload: keep the momentum in fp32."""


class MuonParams(Section):
    """Muon for the matrices that are tagged ``use_muon``, Adam for the other parameters."""

    lr: NonNegative = 0.02
    """Learning rate of both halves. Where it is absent, that of the Adam half is 3e-4."""
    muon_lr: NonNegative | None = None
    """Learning rate of the Muon half. Default: ``lr``."""
    adam_lr: NonNegative | None = None
    """Learning rate of the Adam half. Default: ``lr``."""
    momentum: Beta = 0.95
    """Momentum of the Muon half."""
    weight_decay: NonNegative = 0.0
    """Decay of the weights, both halves."""
    ns_method: str | None = None
    """Newton-Schulz method, such as ``gram``."""
    per_head_muon: bool = False
    """Treat each attention head's rows of the query, key and value projections as a matrix of its own."""
    betas: Betas = [0.9, 0.95]
    """Moments of the Adam half."""
    eps: NonNegative = 1e-10
    """Denominator of the Adam half."""
    adam_w_mode: bool = True
    """Decoupled weight decay in the Adam half."""
    torch_adam: bool = True
    """torch's Adam for the Adam half, which compiles nothing. DeepSpeed's own default is its compiled one."""
    fp32_optimizer_states: bool = True
    """With CPU offload: keep the moments in fp32."""


class MupParams(Section):
    """Optimizers of the package ``mup``: parameters go to it as they are."""

    open: ClassVar[bool] = True

    lr: NonNegative = 1e-3
    """Learning rate."""


class OwnParams(Section):
    """An optimizer of the user's own, ``module:Class``: arguments go to it as they are."""

    open: ClassVar[bool] = True

    lr: NonNegative
    """Learning rate, on which the schedule works. Required."""


class AdagradParams(TorchParams):
    """Adagrad: torch's, or DeepSpeed's with CPU offload."""

    lr: NonNegative = 0.01
    """Learning rate."""
    eps: NonNegative = 1e-10
    """Added to the denominator."""
    lr_decay: NonNegative = 0.0
    """torch: decay of the learning rate."""
    initial_accumulator_value: NonNegative = 0.0
    """torch: where the sum of squares starts."""
    fused: bool | None = None
    """torch: the fused kernel."""
    amsgrad: bool = False
    """DeepSpeed, with CPU offload."""
    fp32_optimizer_states: bool = True
    """DeepSpeed, with CPU offload: keep the state in fp32."""

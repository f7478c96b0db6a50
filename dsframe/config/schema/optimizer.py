# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""``optimizer``: the update rule and its parameters.

``type`` names one of DeepSpeed's own (in any case) or a class of ``torch.optim`` (exact case). What ``params`` may hold
depends on it. Source: ``DeepSpeedEngine._configure_basic_optimizer`` of DeepSpeed 0.19.8 and torch 2.13.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from dsframe.config.schema.base import NonNegative, Real, Section, SectionClass
from dsframe.config.schema.torch_optimizer import TORCH_OPTIMIZERS, Beta, Betas, Params, TorchParams


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


def muon_rates(params: Mapping[str, Any]) -> tuple[float, float]:
    """The learning rates of Muon's halves: its own matrices', and those of the Adam beside it.

    Source: deepspeed 0.19.8, ``runtime/engine.py`` (_configure_basic_optimizer), ``runtime/zero/muon/original_muon.py``.
    """
    both = params.get("lr")
    muon, adam = (both if params.get(key) is None else params[key] for key in ("muon_lr", "adam_lr"))
    return 0.02 if muon is None else float(muon), 3e-4 if adam is None else float(adam)


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


MUP = ("muadam", "muadamw", "musgd")
"""Optimizers of the package ``mup``, whose rates differ by the layers' widths."""


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


DEEPSPEED_OPTIMIZERS: Mapping[str, tuple[str, type[Section]]] = {
    "adam": ("Adam", AdamParams),
    "adamw": ("AdamW", AdamParams),
    "adagrad": ("Adagrad", AdagradParams),
    "lamb": ("Lamb", LambParams),
    "lion": ("Lion", LionParams),
    "muon": ("Muon", MuonParams),
    "muadam": ("MuAdam", MupParams),
    "muadamw": ("MuAdamW", MupParams),
    "musgd": ("MuSGD", MupParams),
}
"""Lower-case name -> usual spelling and parameters: DeepSpeed ignores the case of these."""

WITHOUT_ROUTE: Mapping[str, str] = {
    "sparseadam": "it takes sparse gradients only",
    "fusedadam": 'DeepSpeed picks it itself: write "AdamW"',
    "deepspeedcpuadam": 'DeepSpeed picks it itself with optimizer offload: write "AdamW"',
    "cpuadam": 'DeepSpeed picks it itself with optimizer offload: write "AdamW"',
    "fusedlamb": 'write "Lamb"',
    "adamw8bit": "it is of the package bitsandbytes, which a file cannot name; give DeepSpeed the object instead",
    "adam8bit": "it is of the package bitsandbytes, which a file cannot name; give DeepSpeed the object instead",
    "onebitadam": "1-bit Adam has been removed from DeepSpeed",
    "zerooneadam": "0/1 Adam has been removed from DeepSpeed",
    "onebitlamb": "1-bit LAMB has been removed from DeepSpeed",
}
"""Lower-case names of optimizers that cannot be used, and why."""


OF_TASK = "task"
"""Type of an optimizer that the task makes (``Task.optimizer``)."""


class Optimizer(Section):
    """The update rule. Without this section DeepSpeed expects an optimizer from the program; dsframe asks for one."""

    type: str
    """Adam, AdamW, Adagrad, Lamb, Lion, Muon, MuAdam, MuAdamW, MuSGD, a class of ``torch.optim`` such as SGD; ``module:Class``, an
    optimizer of your own in the form of torch's; or ``task``, what ``Task.optimizer`` makes. DeepSpeed takes these two at stage 0,
    and at stages 1 to 3 with ``zero_allow_untested_optimizer``."""
    params: dict[str, Any] = {}
    """Arguments of the optimizer."""
    legacy_fusion: bool = False
    """Pick the old fused fp16 optimizer wrapper at stage 0."""

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> SectionClass | None:
        name = raw.get("type")
        if key != "params" or not isinstance(name, str):
            return None
        if name.lower() in DEEPSPEED_OPTIMIZERS:
            return DEEPSPEED_OPTIMIZERS[name.lower()][1]
        return OwnParams if ":" in name or name == OF_TASK else TORCH_OPTIMIZERS.get(name)

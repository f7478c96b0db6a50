"""Creates the optimizer that the file names, the same on every engine.

DeepSpeed's ``Adam`` and ``AdamW`` compile a C++ op at first use, for about two minutes on a cold machine (measured).
Torch's ``AdamW(fused=True)`` computes the same and is already compiled. Every engine uses it unless the file asks for
DeepSpeed's op with ``"torch_adam": false`` (also for Muon's Adam half), or for an option that only DeepSpeed has (no
bias correction). Where defaults differ, DeepSpeed's apply: weight decay is 0 if the file does not set it (torch's
AdamW: 0.01).

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_configure_basic_optimizer``) and ``ops/adam/fused_adam.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from dsframe.config.features import own_adam
from dsframe.config.schema.optimizer import OF_TASK, Optimizer, muon_rates
from dsframe.errors import ConfigError, EngineError, Problem, TaskError
from dsframe.tasks.task import Task, gives

if TYPE_CHECKING:
    from dsframe.config.value import Config

_ADAM = frozenset({"adam", "adamw"})
_DEEPSPEED_ONLY = frozenset({"lamb", "lion", "muon"})


@dataclass(frozen=True)
class OptimizerSpec:
    """The file's ``optimizer`` section."""

    kind: str
    """``optimizer.type`` as written."""
    cls: Callable[..., torch.optim.Optimizer] | None
    """Torch's class, or a function that creates the user's; None for optimizers that only DeepSpeed has."""
    arguments: Mapping[str, Any]
    """Keyword arguments of ``cls``, or ``optimizer.params`` as written."""
    legacy_fusion: bool = False
    """Selects among DeepSpeed's wrappers of its fused Adam."""
    kept_outside: set[str] = field(default_factory=set, compare=False)
    """Attributes that a user's optimizer has changed in its first step outside its state; no checkpoint has them."""

    @property
    def learning_rate(self) -> float:
        """Base learning rate of schedules: the file's, else the optimizer's default; the higher of Muon's halves."""
        if self.kind.lower() == "muon":
            return max(muon_rates(self.arguments))
        if self.is_custom:
            return float(self.arguments["lr"])
        params = Optimizer.variant({"type": self.kind}, "params")
        return float(self.arguments.get("lr", params.model_fields["lr"].default if params else 1e-3))

    @property
    def is_custom(self) -> bool:
        """True for an optimizer of the user's, given by class or made by the task."""
        return ":" in self.kind or self.kind == OF_TASK

    @property
    def name(self) -> str:
        """Name of the class, or of the task's method."""
        return self.kind if self.cls is None else self.cls.__name__

    def build(self, parameters: list[Any]) -> torch.optim.Optimizer:
        """Returns torch's optimizer of ``parameters``, or groups of them. Raises EngineError for optimizers that only
        DeepSpeed has, ConfigError if an argument is unknown or out of range."""
        if self.cls is None:
            raise EngineError(
                f'optimizer "{self.kind}" exists in DeepSpeed only; use engine "deepspeed", or an optimizer of torch'
            )
        try:
            optimizer = self.cls(parameters, **self.arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise _config_error("params", f"{self.name}: {error}") from None
        if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise TaskError(
                f"Task.optimizer returned {type(optimizer).__name__}; return a torch.optim.Optimizer, and call its __init__"
            )
        if (given := _tensors(parameters)) != (has := _tensors(optimizer.param_groups)):
            raise TaskError(
                f"{self.name} has {len(given & has)} of the {len(given)} tensors that it was given, and {len(has - given)} others; "
                'give it all, and freeze parameters by "parameter_groups": [{"match": ..., "freeze": true}]'
            )
        if any("weight_decay" in given for given in parameters if isinstance(given, dict)):
            refuse_decay(optimizer)
        return optimizer

    def for_deepspeed(self) -> dict[str, Any]:
        """Returns the ``optimizer`` section that makes DeepSpeed build the same optimizer."""
        if self.cls in (torch.optim.Adam, torch.optim.AdamW):
            decoupled = self.cls is torch.optim.AdamW
            return {"type": "Adam", "params": {**self.arguments, "adam_w_mode": decoupled, "torch_adam": True}}
        section = {"type": self.kind, "params": dict(self.arguments)}
        return {**section, "legacy_fusion": True} if self.legacy_fusion else section


def _tensors(parameters: list[Any]) -> set[int]:
    groups = [given["params"] if isinstance(given, dict) else [given] for given in parameters]
    return {id(parameter) for group in groups for parameter in group}


def refuse_decay(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError if parameter groups have a weight decay, which this optimizer does not support."""
    if "weight_decay" not in optimizer.defaults and any("weight_decay" in group for group in optimizer.param_groups):
        message = f"{type(optimizer).__name__} has no weight_decay, and parameter groups have one"
        raise ConfigError([Problem("error", "optimizer.type", message, "choose another optimizer", code="value")])


def read(config: Config) -> OptimizerSpec:
    """Returns the file's optimizer. Raises ConfigError if there is none, or if neither DeepSpeed nor torch has it.
    DeepSpeed's names are case-insensitive, torch's are not."""
    section = config.deepspeed.optimizer
    if section is None:
        remedy = 'add "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}'
        raise ConfigError([Problem("error", "optimizer", "missing", remedy, str(config.path or ""), code="missing")])
    if section.type == OF_TASK:
        return OptimizerSpec(section.type, None, section.params)
    if ":" in section.type:
        return OptimizerSpec(section.type, _users_class(section.type), section.params)
    name = section.type.lower()
    if name in _ADAM:
        if own_adam(config.deepspeed):
            return OptimizerSpec(section.type, None, section.params, section.legacy_fusion)
        return _adam(section.type, section.params)
    if name == "muon":
        return OptimizerSpec(section.type, None, {"torch_adam": True, **section.params})
    if name in _DEEPSPEED_ONLY:
        return OptimizerSpec(section.type, None, section.params)
    cls = getattr(torch.optim, "Adagrad" if name == "adagrad" else section.type, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise _config_error("type", f"{section.type!r} is neither one of DeepSpeed's optimizers nor in torch.optim")
    return OptimizerSpec(section.type, cls, section.params)


def of_task(spec: OptimizerSpec, task: Task) -> OptimizerSpec:
    """Returns ``spec``, with the task's method if the file's type is "task". Raises TaskError if it has none."""
    if spec.kind != OF_TASK:
        return spec
    if not gives(task, "optimizer"):
        raise TaskError(
            f'optimizer.type is "{OF_TASK}", and {type(task).__name__} has no optimizer(groups, **params); define it'
        )
    return replace(spec, cls=task.optimizer)


def try_out(spec: OptimizerSpec, device: torch.device) -> None:
    """Makes one update of a scalar. Raises ConfigError if torch refuses the arguments on this device."""
    if spec.is_custom or spec.cls is None or spec.cls is torch.optim.SparseAdam:
        return
    number = torch.zeros(1, device=device, requires_grad=True)
    number.grad = torch.zeros_like(number)
    optimizer = spec.build([number])
    try:
        optimizer.step(lambda: 0.0)
    except Exception as error:  # torch raises AssertionError, RuntimeError and others
        raise _config_error("params", f"{spec.name}: {error}") from None


def _users_class(name: str) -> type[torch.optim.Optimizer]:
    """Returns the user's class ``module:Class``. Raises ConfigError if it is missing or no torch optimizer."""
    module, _, attribute = name.partition(":")
    try:
        cls = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise _config_error("type", f"{name!r} cannot be imported: {error}") from None
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise _config_error("type", f"{name!r} is not a subclass of torch.optim.Optimizer")
    return cls


def _adam(kind: str, params: Mapping[str, Any]) -> OptimizerSpec:
    arguments = dict(params)
    # "Adam" means AdamW unless adam_w_mode is false.
    decoupled = arguments.pop("adam_w_mode", True) or kind.lower() == "adamw"
    torch_adam = arguments.pop("torch_adam", None)
    arguments.pop("bias_correction", None)  # torch's always corrects it
    arguments.pop("set_grad_none", None)  # no effect on training
    arguments.pop("fp32_optimizer_states", None)  # the masters are fp32, and torch's moments have their dtype
    if torch_adam is None:
        arguments.setdefault("weight_decay", 0.0)
    if "betas" in arguments:
        arguments["betas"] = tuple(map(float, arguments["betas"]))  # 0.0 is read as 0, and torch takes floats
    if not arguments.keys() & {"fused", "foreach", "capturable", "differentiable"}:
        arguments["fused"] = True
    return OptimizerSpec(kind, torch.optim.AdamW if decoupled else torch.optim.Adam, arguments)


def _config_error(key: str, message: str) -> ConfigError:
    return ConfigError([Problem("error", f"optimizer.{key}", message, code="value")])

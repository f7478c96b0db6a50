"""Dtypes of a model that the file does not specify."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dsframe.config.read.suggest import similar_pattern
from dsframe.errors import ConfigError, EngineError, TaskError
from dsframe.values import filled

if TYPE_CHECKING:
    from dsframe.config.value import Config
    from dsframe.tasks.task import Task

_KEPT = "_dsframe_fp32"
"""Attribute of a parameter that stays in fp32 if the others are in 16 bits."""


def parameter_dtype(config: Config) -> torch.dtype:
    """Returns the dtype of the model's parameters: bfloat16, float16 or float32."""
    if config.deepspeed.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.deepspeed.fp16.enabled else torch.float32


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Returns the parts of a transformers model that transformers keeps in fp32 if others are ``dtype``, and the file
    does not. Source: transformers 5, modeling_utils.py (_keep_in_fp32_modules: only fp16, _keep_in_fp32_modules_strict:
    bf16 too)."""
    attributes = {torch.bfloat16: ["_strict"], torch.float16: ["", "_strict"]}.get(dtype, [])
    parts = {name for kind in attributes for name in getattr(model, f"_keep_in_fp32_modules{kind}", None) or ()}
    rounded = [name for name, parameter in model.named_parameters() if not is_kept(parameter)]
    return sorted(part for part in parts if any(part in name for name in rounded))


def keep_in_fp32(config: Config, model: nn.Module) -> None:
    """Marks the parameters that the file keeps in fp32. Modules whose parameters are all kept compute in fp32. Raises
    ConfigError if a pattern matches no parameter, or only some of those that a torch layer needs in one dtype."""
    dtype, names = parameter_dtype(config), dict(model.named_parameters(remove_duplicate=False))
    for parameter in names.values():  # a task may return the same module again
        vars(parameter).pop(_KEPT, None)
    where = ("dsframe", "model", "keep_in_fp32")
    for pattern in config.settings.model.keep_in_fp32:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            message = f'"{pattern}" matches no parameter of the model'
            raise ConfigError([config.error(where, message, similar_pattern(pattern, names), code="model")])
        for name in matched:
            setattr(names[name], _KEPT, True)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn.") and list(module.parameters(recurse=False)):
            kept = [is_kept(parameter) for parameter in module.parameters()]  # including attention's output layer
            if any(kept) and not all(kept):
                message = (
                    f"{name} is a {type(module).__name__}, whose parameters have one format, and some of them are kept"
                )
                raise ConfigError([config.error(where, message, f'write "{name}.*"', code="model")])
    for module in kept_modules(model):
        module.register_forward_pre_hook(lambda _, *given: filled(given, _cast(given, torch.float32)), with_kwargs=True)
        module.register_forward_hook(lambda _, args, outputs: _cast(outputs, dtype))


def is_kept(parameter: nn.Parameter) -> bool:
    """Returns True if the file keeps this parameter in fp32."""
    return hasattr(parameter, _KEPT)


def kept_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules whose parameters are all kept in fp32."""
    kept: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        parameters = list(module.parameters())
        if module not in inside and parameters and all(map(is_kept, parameters)):
            kept.append(module)
            inside.update(module.modules())
    return kept


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def own_dtype(config: Config, task: Task, model: nn.Module, *, keeps_float64: bool, part: str = "") -> torch.dtype:
    """Returns the dtype of the master weights: the model's own if the file specifies none. ``part``: name of one of
    several models. Raises TaskError if the model is in 16 bits or several dtypes and the file does not specify one,
    EngineError if it is in float64 and the engine does not support that."""
    file = config.deepspeed
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if file.bf16.enabled or file.fp16.enabled or dtypes <= {torch.float32}:
        return torch.float32
    if dtypes == {torch.float64} and keeps_float64:
        return torch.float64
    if dtypes == {torch.float64}:
        raise EngineError(
            "the model is in float64, and this engine keeps float32: every weight would be rounded; choose an engine of torch or "
            "Horovod, or return model.float()"
        )
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    whose = f"{type(task).__name__}.model{f's: {part!r}' if part else ''}"
    raise TaskError(
        f"{whose} is in {names}, and the file names no number format; write "
        f'"bf16": {{"enabled": true}} (its masters are float32{", for all models" if part else ""}), or return model.float()'
    )

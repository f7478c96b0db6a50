"""Applies the memory and speed options in the file's ``model`` section to a model, in place, before any engine takes
it.

They change neither names nor values of parameters and buffers, so checkpoints are independent of them, and they work on
every engine. Modules are found by class name; a block is a class that the model repeats, such as a transformer layer.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsframe.config.rules.model import compiler
from dsframe.errors import ConfigError, Problem
from dsframe.model import recomputation

if TYPE_CHECKING:
    from dsframe.config.value import Config

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_UNIT = "_dsframe_unit"
"""Attribute of a module that is recomputed or compiled separately."""
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


def apply(model: nn.Module, config: Config, device: torch.device, whole: nn.Module | None = None) -> None:
    """Applies the options of the file's ``dsframe.model``. ``whole``: the complete model, if ``model`` is this rank's
    part of it; may be on the meta device. Raises ConfigError if an option has no effect on the complete model, or if
    this machine cannot compile."""
    whole = model if whole is None else whole
    for parameter in model.parameters():
        # A weight's gradient has its memory layout: Horovod refuses non-contiguous gradients, and torch's fused
        # optimizers ignore strides (moments loaded from a checkpoint are contiguous).
        parameter.data = parameter.data.contiguous()
    dense(model)
    wanted = config.settings.model
    again = wanted.recomputation
    names = again.modules if again else None
    if wanted.channels_last:
        channels_last(model, whole)
    if wanted.compile == "blocks":
        for block in _modules_named(model, picked(whole, names, "compile")):
            compile_(block, device)
    elif wanted.compile:  # never a part of a model, which the config check refuses
        compile_(model, device)
    if again:
        for block in _modules_named(model, recomputed(whole, config)):
            recomputation.recompute(block)
            setattr(block, _UNIT, True)


def recomputed(whole: nn.Module, config: Config) -> list[str]:
    """Returns the names of the recomputed modules. Raises ConfigError like :func:`apply`."""
    wanted = config.settings.model.recomputation
    return [] if wanted is None else picked(whole, wanted.modules, "activation_checkpointing")[:: wanted.every]


def dense(model: nn.Module) -> None:
    """Makes embeddings with ``sparse=True`` return dense gradients with the same values, and warns once in a process.
    Norms, flat buckets and fused optimizers have no kernels for sparse gradients, and Adam does not support them."""
    sparse = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    for module in sparse:
        module.sparse = False
    if sparse:
        warnings.warn("embeddings with sparse=True are trained with dense gradients: the same numbers", stacklevel=1)


# Finding modules.


def picked(model: nn.Module, wanted: Sequence[str] | None, key: str) -> list[str]:
    """Returns the names of the modules that ``wanted`` selects, in the model's order; only the outermost of nested
    ones.

    An entry is a class name, or, with a dot or ``*``, a pattern of module names. None selects the class of the blocks:
    the class with submodules (no container) that occurs at least twice and has the most parameters. Raises ConfigError,
    which lists the options, if an entry selects nothing.
    """
    named = [(name, module) for name, module in model.named_modules() if module is not model]
    classes = Counter(type(module).__name__ for _, module in named)
    if wanted is None:
        class_name = repeated(model)
        if class_name is None:
            raise _config_error(
                key, "the model has no repeated block", f"name some of its classes: {_class_counts(classes)}"
            )
        wanted = [class_name]
    chosen: set[str] = set()
    for entry in wanted:
        by_name = "." in entry or "*" in entry
        if by_name:
            matching = {name for name, _ in named if fnmatch.fnmatch(name, entry)}
        else:
            matching = {name for name, module in named if type(module).__name__ == entry}
        if not matching and by_name:
            there = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name, _ in named))
            raise _config_error(key, f"no module of the model is called {entry}", f"there are {', '.join(there)}")
        if not matching:
            raise _config_error(key, f"the model has no module of class {entry}", f"there are {_class_counts(classes)}")
        chosen |= matching
    inside = tuple(f"{name}." for name in chosen)
    return [name for name, _ in named if name in chosen and not name.startswith(inside)]


def _modules_named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Returns those modules of the given names that ``model``, perhaps a part of the complete model, has."""
    chosen = set(names)
    return [module for name, module in model.named_modules() if name in chosen]


def repeated(model: nn.Module) -> str | None:
    """Returns the class name of the model's blocks, as defined in :func:`picked`; None if it repeats none."""
    sizes: Counter[str] = Counter()
    for module in model.modules():
        inside = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
        of_parts = any(True for _ in module.children()) and not isinstance(module, _CONTAINERS)
        if module is not model and of_parts and inside:
            sizes[type(module).__name__] += inside
    often = Counter(type(module).__name__ for module in model.modules())
    return next((name for name, _ in sizes.most_common() if often[name] > 1), None)


def _class_counts(classes: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in classes.most_common())


def units(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that are recomputed or compiled separately: each needs all its parameters while it runs."""
    return [module for module in model.modules() if hasattr(module, _UNIT) and module is not model]


# Memory format and compilation.


def channels_last(model: nn.Module, whole: nn.Module) -> None:
    """Gives every 2-D convolution its input in channels_last layout, which kernels of CPUs and GPUs prefer.

    Weights do not change, because ZeRO flattens them, Horovod refuses non-contiguous gradients, and torch gives a
    gradient the layout of its weight. Raises ConfigError if ``whole`` has no 2-D convolution.

    The backward pass of pooling uses the layout of its output's gradient, contiguous after ``nn.Flatten``, and converts
    the gradient of its larger input twice (torch 2.13, ``ATen/native/cpu/MaxPoolKernel.cpp``). So the output's gradient
    is converted first. A compiler does that by itself.
    """
    if not any(isinstance(module, _CONVOLUTIONS) for module in whole.modules()):
        raise _config_error(
            "channels_last", "channels_last affects 2-D convolutions only; this model has none", "remove it"
        )
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            module.register_forward_pre_hook(_innermost)
        elif isinstance(module, _POOLS):
            module.register_forward_hook(_innermost_backward)


def _innermost(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.to(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.ndim == 4 else value
        for value in inputs
    )


def _innermost_backward(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling() or not (isinstance(output, Tensor) and output.ndim == 4 and output.requires_grad):
        return
    if output.is_contiguous(memory_format=torch.channels_last):
        output.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient.contiguous(memory_format=torch.channels_last)
        )


def compile_(module: nn.Module, device: torch.device) -> None:
    """Compiles the module's forward pass with torch.compile, in place. Raises ConfigError if there is no compiler.
    Compiles the method and not the call, so that an engine's hooks on this module stay outside the graph."""
    if device.type == "cpu" and compiler() is None:
        message = "torch.compile needs a C++ compiler, which this machine does not have"
        raise _config_error("compile", message, "install g++, or remove it")
    module.forward = torch.compile(module.forward)
    setattr(module, _UNIT, True)


def _config_error(key: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("error", f"dsframe.model.{key}", message, remedy, code="model")])

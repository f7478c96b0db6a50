"""Memory and speed switches of the ``model`` part of the file, applied to a model in place before any engine takes it.

They change neither the names nor the values of parameters and buffers, so a checkpoint does not know of them, and every engine
gets them for nothing. Modules are found by class name; a block is a class that the model repeats, such as a transformer's layer.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
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
"""Attribute of a module that runs as one."""
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


def apply(model: nn.Module, config: Config, device: torch.device, whole: nn.Module | None = None) -> None:
    """Switches on what the file's ``dsframe.model`` asks for.

    ``whole``: the whole model, where ``model`` is the part of it that this rank has; without memory (device "meta") will do.
    Raises ConfigError where the whole model has nothing that a switch could act on, or this machine cannot compile.
    """
    whole = model if whole is None else whole
    for parameter in model.parameters():
        # A weight in another layout gives gradients in that layout: Horovod refuses them, and torch's fused optimizers walk
        # through memory without looking (moments that a checkpoint brought back are laid out plainly).
        parameter.data = parameter.data.contiguous()
    dense(model)
    wanted = config.settings.model
    again = wanted.recomputation
    names = again.modules if again else None
    if wanted.channels_last:
        channels_last(model, whole)
    if wanted.compile == "blocks":
        for block in _of(model, picked(whole, names, "compile")):
            compile_(block, device)
    elif wanted.compile:  # never of a part: the check refuses it
        compile_(model, device)
    if again:
        for block in _of(model, recomputed(whole, config)):
            recomputation.recompute(block)
            setattr(block, _UNIT, True)


def recomputed(whole: nn.Module, config: Config) -> list[str]:
    """The names of the modules that are recomputed. Raises ConfigError as :func:`apply`."""
    wanted = config.settings.model.recomputation
    return [] if wanted is None else picked(whole, wanted.modules, "activation_checkpointing")[:: wanted.every]


def dense(model: nn.Module) -> None:
    """Embeddings built with ``sparse=True`` give dense gradients, which are the same numbers; says so once in a process.

    Norms, flat buckets and fused optimizers have no kernels for sparse ones, nor has Adam any.
    """
    sparse = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    for module in sparse:
        module.sparse = False
    if sparse:
        warnings.warn("embeddings with sparse=True are trained with dense gradients: the same numbers", stacklevel=1)


# Finding modules.


def picked(model: nn.Module, wanted: Sequence[str] | None, key: str) -> list[str]:
    """The names of the modules that a file's ``wanted`` chooses, in the model's order; of nested ones the outermost.

    An entry is the name of a class, or, with a dot or ``*``, of modules; with None it is the class of the blocks: the class with
    submodules of its own (no container) that occurs at least twice and holds the most parameters.
    Raises ConfigError, naming what there is, where an entry chooses nothing.
    """
    named = [(name, module) for name, module in model.named_modules() if module is not model]
    classes = Counter(type(module).__name__ for _, module in named)
    if wanted is None:
        class_name = repeated(model)
        if class_name is None:
            raise _wrong(key, "the model has no repeated block", f"name some of its classes: {_list(classes)}")
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
            raise _wrong(key, f"no module of the model is called {entry}", f"there are {', '.join(there)}")
        if not matching:
            raise _wrong(key, f"the model has no module of class {entry}", f"there are {_list(classes)}")
        chosen |= matching
    return [name for name, _ in named if name in chosen and not any(above in chosen for above in _above(name))]


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _of(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of these names, those that ``model`` has: it may be a part of what the names are from."""
    chosen = set(names)
    return [module for name, module in model.named_modules() if name in chosen]


def repeated(model: nn.Module) -> str | None:
    """The class of the model's blocks, found as :func:`blocks` says; None where it repeats none."""
    sizes: Counter[str] = Counter()
    for module in model.modules():
        inside = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
        of_parts = any(True for _ in module.children()) and not isinstance(module, _CONTAINERS)
        if module is not model and of_parts and inside:
            sizes[type(module).__name__] += inside
    often = Counter(type(module).__name__ for module in model.modules())
    return next((name for name, _ in sizes.most_common() if often[name] > 1), None)


def _list(classes: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in classes.most_common())


def units(model: nn.Module) -> list[nn.Module]:
    """The modules that are recomputed or compiled each by itself: all their parameters must be there while one runs."""
    return [module for module in model.modules() if hasattr(module, _UNIT) and module is not model]


# Memory format and compilation.


def channels_last(model: nn.Module, whole: nn.Module) -> None:
    """Every 2-D convolution gets its input with the channels innermost, as processors' and GPUs' kernels like it best.

    Only activations change their layout. Weights stay as they are: ZeRO flattens them, Horovod refuses gradients that are not
    contiguous, and torch gives a gradient the layout of its weight. Raises ConfigError where the ``whole`` has no 2-D convolution.

    Pooling follows in its backward pass the layout of what comes back, plain behind ``nn.Flatten``, and copies the gradient of its
    input, which is larger, to that layout and back (torch 2.13, ``ATen/native/cpu/MaxPoolKernel.cpp``). So what comes back is
    laid out first. A compiler does that by itself.
    """
    if not any(isinstance(module, _CONVOLUTIONS) for module in whole.modules()):
        raise _wrong("channels_last", "channels_last affects 2-D convolutions only; this model has none", "remove it")
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
    """torch.compile of the module's forward pass, in place. Raises ConfigError where there is no compiler.

    The method and not the call: hooks that an engine puts on this module stay outside of the compiled graph.
    """
    if device.type == "cpu" and compiler() is None:
        message = "torch.compile needs a C++ compiler, which this machine does not have"
        raise _wrong("compile", message, "install g++, or remove it")
    module.forward = torch.compile(module.forward)
    setattr(module, _UNIT, True)


def _wrong(key: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("error", f"dsframe.model.{key}", message, remedy, code="model")])

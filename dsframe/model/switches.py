"""Memory and speed switches of the ``model`` part of the file, applied to a model in place before any engine takes it.

They change neither the names nor the values of parameters and buffers, so a checkpoint does not know of them, and every engine
gets them for nothing. Modules are found by class name; a block is a class that the model repeats, such as a transformer's layer.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsframe.config.rules.model import compiler
from dsframe.errors import ConfigError, Problem, TaskError

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
            recompute(block)


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


# Activation checkpointing.


def recompute(block: nn.Module) -> None:
    """Keeps only the inputs of ``block`` and computes the rest again in the backward pass (Chen et al. 2016, arXiv 1604.06174).

    The method is replaced, not the module wrapped: names stay.
    """
    forward, again = block.forward, checkpoint_function(block)

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return again(forward, *args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    block.forward = checkpointed
    setattr(block, _UNIT, True)


def checkpoint_function(module: nn.Module) -> Callable[..., Any]:
    """torch's ``checkpoint`` for functions that run parts of ``module``: under the same autocast and with the same buffers.

    A block that changes a buffer (BatchNorm's statistics, a spectral norm's vectors) computes again from what the buffer was, and
    leaves it as the first pass has.
    """
    changing = set[tuple[nn.Module, str]]()  # large ones; small ones are copied in any case, and all at first
    calls = 0

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        nonlocal calls
        calls += 1
        before = _held_buffers(module, changing if calls > 1 else None)
        return watched(before), _as_before(before)

    @contextmanager
    def watched(before: dict[tuple[nn.Module, str], _Held]) -> Iterator[None]:
        yield
        changed = {key for key, buffer in before.items() if buffer.changed(*key)}
        for owner, name in changed:
            if before[owner, name].copy is None:
                raise TaskError(
                    f"a recomputed {type(module).__name__} changes its large buffer {name} only in some steps, and what it was is "
                    "not known any more; change it in each forward pass, or leave activation_checkpointing out"
                )
        for key in before.keys() - changed:
            del before[key]
        changing.update(changed)

    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


_SMALL_BUFFER = 1 << 16
"""Elements."""


@dataclass
class _Held:
    """A buffer before a forward pass."""

    buffer: Tensor
    version: int
    copy: Tensor | None

    def changed(self, owner: nn.Module, name: str) -> bool:
        if isinstance(owner, nn.modules.batchnorm._NormBase):
            return owner.training  # its kernels count no version
        return owner._buffers[name] is not self.buffer or self.buffer._version != self.version


@torch.no_grad()
def _held_buffers(
    module: nn.Module, changing: set[tuple[nn.Module, str]] | None = None
) -> dict[tuple[nn.Module, str], _Held]:
    """The buffers of ``module``; copies of small ones and of those that are ``changing``, of all where that is None."""
    held = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                copied = changing is None or buffer.numel() <= _SMALL_BUFFER or (owner, name) in changing
                held[owner, name] = _Held(buffer, buffer._version, buffer.detach().clone() if copied else None)
    return held


@contextmanager
def _as_before(before: Mapping[tuple[nn.Module, str], _Held]) -> Iterator[None]:
    now = {(owner, name): owner._buffers[name] for owner, name in before}
    copies = {id(held.buffer): held.copy.clone() for held in before.values() if held.copy is not None}
    for (owner, name), held in before.items():
        owner._buffers[name] = copies[id(held.buffer)]
    try:
        yield
    finally:
        for (owner, name), buffer in now.items():
            owner._buffers[name] = buffer


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

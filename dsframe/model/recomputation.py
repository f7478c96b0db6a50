"""Activation checkpointing: blocks that compute again in the backward pass what they computed in the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsframe.errors import TaskError
from dsframe.model.user_state import Generators, Numbers


def recompute(block: nn.Module) -> None:
    """Keeps only the inputs of ``block`` and computes the rest again in the backward pass (Chen et al. 2016, arXiv 1604.06174).

    The method is replaced, not the module wrapped: names stay.
    """
    forward, again = block.forward, checkpoint_function(block)

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return again(forward, *args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    block.forward = checkpointed


def checkpoint_function(module: nn.Module) -> Callable[..., Any]:
    """torch's ``checkpoint`` for functions that run parts of ``module``: under the same autocast and from the same state.

    What a block changes is, for the time in which it computes again, as it was before the first pass, which alone counts: buffers
    (BatchNorm's statistics, a spectral norm's vectors), numbers in attributes, generators of NumPy, of Python and of its own.
    """
    changing = set[tuple[nn.Module, str]]()  # large ones; small ones are copied in any case, and all at first
    names = Numbers.names(module.modules())
    calls = 0

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        nonlocal calls
        calls += 1
        before = _held_buffers(module, changing if calls > 1 else None)
        user = _UserState(module, names)
        return watched(before, user), _Again(before, user)

    @contextmanager
    def watched(before: dict[tuple[nn.Module, str], _Held], user: _UserState) -> Iterator[None]:
        yield
        user.keep_changed()
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


class _UserState:
    """Numbers and generators of a module before a forward pass; then those of them that the pass has moved."""

    def __init__(self, module: nn.Module, names: frozenset[str]) -> None:
        self._modules = list(module.modules())
        self._numbers = Numbers(self._modules, names)
        self._generators: Generators | None = Generators(self._modules)

    def keep_changed(self) -> None:
        self._numbers = self._numbers.changed()
        if self._generators is not None and not self._generators.changed():
            self._generators = None

    @contextmanager
    def as_before(self) -> Iterator[None]:
        now = Generators(self._modules) if self._generators else None
        if self._generators:
            self._generators.put_back(process=True)
        self._numbers.swap()
        try:
            yield
        finally:
            self._numbers.swap()
            if now:
                now.put_back(process=True)


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


class _Again:
    """Around what is computed again: once for each backward pass through a block of several outputs."""

    def __init__(self, before: Mapping[tuple[nn.Module, str], _Held], user: _UserState) -> None:
        self._before, self._user, self._inside = before, user, list[ExitStack]()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_as_before(self._before))
            stack.enter_context(self._user.as_before())
            self._inside.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._inside.pop().__exit__(*error)


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

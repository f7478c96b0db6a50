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
from dsframe.model.user_state import Generators, Numbers, generators_of, names_of, numbers_of


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
    state, calls = _UserState(module), 0

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        nonlocal calls
        calls += 1
        before, user = _held_buffers(module, changing if calls > 1 else None), state.taken(calls)
        return watched(before, user), _Again(before, user)

    @contextmanager
    def watched(before: dict[tuple[nn.Module, str], _Held], user: _Taken) -> Iterator[None]:
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


_LOOKS = 16
"""Passes of a block after which its attributes are known, and whether it draws with NumPy or Python."""


class _UserState:
    """What a block keeps in numbers and generators of its own, and whether it draws from those of the process."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._names = module, names_of(module.modules())
        self._places: list[tuple[dict[str, Any], str]] = []
        self._held: list[Any] = []
        self._draws, self._suspected = False, 0

    def taken(self, number: int) -> _Taken:
        """Returns it as it is before forward pass ``number``, from 1."""
        early = number <= _LOOKS
        if early:
            modules = list(self._module.modules())
            self._places = [(space, name) for space, name, _ in numbers_of(modules, self._names)]
            self._held = generators_of(modules)
        looks = self._draws or early or number & (number - 1) == 0
        return _Taken(self, [(space, name, space.get(name)) for space, name in self._places], self._held, looks, number)

    def drew(self, number: int) -> None:
        """NumPy's or Python's generator has moved in pass ``number``. Raises TaskError where earlier passes may have been computed
        again otherwise: when it has moved twice, since another thread may have drawn once."""
        if number > _LOOKS and not self._draws:
            self._suspected = number
        elif 0 < number - self._suspected <= _LOOKS < self._suspected:
            raise TaskError(
                f"a recomputed {type(self._module).__name__} draws with NumPy or random only in some steps, and would draw other "
                "numbers when it computes again; draw in each forward pass, or leave activation_checkpointing out"
            )
        self._draws = True


class _Taken:
    """Numbers and generators before a forward pass; then those of them that the pass has moved."""

    def __init__(self, state: _UserState, numbers: Numbers, held: list[Any], looks: bool, number: int) -> None:
        self._state, self._numbers, self._held, self._looks, self._number = state, numbers, held, looks, number
        self._generators: Generators | None = Generators(held, process=looks)

    def keep_changed(self) -> None:
        self._numbers = [(space, name, value) for space, name, value in self._numbers if space.get(name) is not value]
        if self._generators is not None and self._generators.process_changed():
            self._state.drew(self._number)
        elif self._generators is not None and not self._generators.changed():
            self._generators = None

    @contextmanager
    def as_before(self) -> Iterator[None]:
        now = Generators(self._held, process=self._looks) if self._generators else None
        if self._generators:
            self._generators.put_back(process=True)
        self._swap()
        try:
            yield
        finally:
            self._swap()
            if now:
                now.put_back(process=True)

    def _swap(self) -> None:
        now = [(space, name, space.get(name)) for space, name, _ in self._numbers]
        for space, name, value in self._numbers:
            space[name] = value
        self._numbers = now


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

    def __init__(self, before: Mapping[tuple[nn.Module, str], _Held], user: _Taken) -> None:
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

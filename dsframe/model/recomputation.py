"""Activation checkpointing: blocks that compute again in the backward pass what they computed in the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial, wraps
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from dsframe.errors import TaskError
from dsframe.model.user_spaces import Space, attributes, names_of, outside
from dsframe.model.user_state import GENERATORS, Generators, generators_of
from dsframe.values import CONTAINERS, COUNTERS, FEW, copied, same


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
    (BatchNorm's statistics, a spectral norm's vectors), plain values in attributes, in globals and classes of the user's files,
    generators of NumPy, of Python and of its own.
    """
    state = _UserState(module)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        taken = state.taken()
        return taken.watched(), taken

    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


_LOOKS = 16
"""Passes of a block after which it is known whether it draws with NumPy or Python."""
_FIRST = 2
"""Passes whose large tensors are copied: the first may make them, and the second change them in place."""


class _UserState:
    """What a block's code may change, and whether it draws from the generators of the process."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self._passes = module, 0
        self.spaces: list[tuple[Space, nn.Module | None]] = []
        self.generators: list[Any] = []
        self.changing = set[tuple[int, str]]()
        """Large values that the first passes changed in place; small ones are copied in any case."""
        self._draws, self._suspected = False, 0

    def taken(self) -> _Taken:
        """Returns it as it is before the next forward pass."""
        self._passes = number = self._passes + 1
        if number <= _FIRST:
            self.spaces = self._looked_at()
        if number <= _LOOKS:
            self.generators = generators_of(self.module.modules())
        held = [
            _Held(space, key, value, number <= _FIRST or (id(space.owner), key) in self.changing, norm)
            for space, norm in self.spaces
            for key, value in _values(space)
        ]
        looks = self._draws or number <= _LOOKS or number & (number - 1) == 0
        return _Taken(self, held, looks, number)

    def _looked_at(self) -> list[tuple[Space, nn.Module | None]]:
        """Returns where values lie; beside the buffers of a BatchNorm, whose kernels count no version, the module."""
        modules = list(self.module.modules())
        words = names_of(modules)
        buffers = [
            (Space(owner._buffers, words.union(owner._buffers), "{}"), owner if isinstance(owner, _NormBase) else None)
            for owner in modules
            if isinstance(owner._buffers, dict)  # not torch.jit's
        ]
        return [*buffers, *((space, None) for space in [*attributes(self.module), *outside(modules)])]

    def drew(self, number: int) -> None:
        """NumPy's or Python's generator has moved in pass ``number``. Raises TaskError where earlier passes may have been computed
        again otherwise: when it has moved twice, since another thread may have drawn once."""
        if number > _LOOKS and not self._draws:
            self._suspected = number
        elif 0 < number - self._suspected <= _LOOKS < self._suspected:
            raise TaskError(
                f"a recomputed {type(self.module).__name__} draws with NumPy or random only in some steps, and would draw other "
                "numbers when it computes again; draw in each forward pass, or leave activation_checkpointing out"
            )
        self._draws = True


def _values(space: Space) -> Iterator[tuple[str, Any]]:
    values = space.values()
    return ((key, values[key]) for key in values.keys() & space.names if _is_kept(type(values[key])))  # type: ignore[arg-type]  # mypy's own mistake: classes have a hash


@lru_cache(1024)  # a configuration of transformers takes 3 us to say what it is an instance of
def _is_kept(cls: type) -> bool:
    is_called = any("__call__" in vars(base) for base in cls.__mro__)
    return not is_called and not issubclass(cls, (ModuleType, *GENERATORS))


class _Taken:
    """Values and generators before a forward pass; then those of them that the pass has changed.

    A context around what is computed again: once for each backward pass through a block of several outputs.
    """

    def __init__(self, state: _UserState, held: list[_Held], looks: bool, number: int) -> None:
        self._state, self._changed, self._looks, self._number = state, held, looks, number
        self._spaces = [(space, len(space.values())) for space, _ in state.spaces]
        self._generators: Generators | None = Generators(state.generators, process=looks)
        self._inside = list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._inside.append(self._as_before())
        self._inside[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inside.pop().__exit__(*error)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The first pass."""
        yield
        known = {(id(held.space.owner), held.key) for held in self._changed}
        new = [
            _Held(space, key, _ABSENT)
            for space, entries in self._spaces
            if len(space.values()) > entries
            for key, _ in _values(space)
            if (id(space.owner), key) not in known
        ]
        self._changed = [held for held in self._changed if held.changed()] + new
        for held in self._changed:
            if held.is_lost():
                raise TaskError(
                    f"a recomputed {type(self._state.module).__name__} changes its large {held.key} only in some steps, and what "
                    "it was is not known any more; change it in each forward pass, or leave activation_checkpointing out"
                )
            self._state.changing.add((id(held.space.owner), held.key))
        if self._generators is not None and self._generators.process_changed():
            self._state.drew(self._number)
        elif self._generators is not None and not self._generators.changed():
            self._generators = None

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """The second pass has copies, which it may change as the first pass changed what was there."""
        generators = Generators(self._state.generators, process=self._looks) if self._generators else None
        if self._generators:
            self._generators.put_back(process=True)
        now = [(held, held.space.values().get(held.key, _ABSENT)) for held in self._changed]
        twins = dict[int, Any]()
        for held in self._changed:
            held.put(held.twin(twins))
        try:
            yield
        finally:
            for held, value in now:
                held.put(value)
            if generators:
                generators.put_back(process=True)


_SMALL = 1 << 16
"""Elements of a tensor that is copied before each pass."""
_ABSENT = object()
_COPIED = (np.ndarray, *CONTAINERS, *COUNTERS)
_PARTS = (Tensor, tuple, *_COPIED)


class _Held:
    """A value before a forward pass."""

    def __init__(self, space: Space, key: str, value: Any, copies: bool = False, norm: nn.Module | None = None) -> None:
        self.space, self.key, self._value, self._norm = space, key, value, norm
        self._parts, self._spec = _flat(value)
        self._versions = [_version(part) for part in self._parts]
        self._copies = [
            _copy(part) if copies or not isinstance(part, Tensor) or part.numel() <= _SMALL else part
            for part in self._parts
        ]

    def changed(self) -> bool:
        """Returns whether there is another value now, or the same with another content."""
        now = self.space.values().get(self.key, _ABSENT)
        if now is not self._value or (self._norm is not None and self._norm.training):
            return True
        parts, spec = _flat(now)
        return spec != self._spec or any(map(_differs, self._parts, self._versions, self._copies, parts))

    def is_lost(self) -> bool:
        """True of a tensor that was not copied and is not any more what it was."""
        return any(
            isinstance(part, Tensor) and copy is part and _version(part) != version
            for part, copy, version in zip(self._parts, self._copies, self._versions, strict=True)
        )

    def twin(self, twins: dict[int, Any]) -> Any:
        """Returns a copy of what it was: of a value in two places one, which ``twins`` has by the value's id."""
        if self._spec is None:
            return self._value
        for part, copy in zip(self._parts, self._copies, strict=True):
            if id(part) not in twins:
                twins[id(part)] = _copy(copy)
        parts = [twins[id(part)] for part in self._parts]
        return twins.setdefault(id(self._value), tree_unflatten(parts, self._spec))

    def put(self, value: Any) -> None:
        if value is not _ABSENT:
            self.space.put(self.key, value)
        elif self.key in self.space.values():
            self.space.drop(self.key)


def _flat(value: Any) -> tuple[list[Any], TreeSpec | None]:
    """The parts of a value that may change while it stays the same object."""
    is_plain = isinstance(value, tuple) and not any(issubclass(type(part), _PARTS) for part in value)
    if is_plain or not issubclass(type(value), _PARTS):
        return [], None
    return tree_flatten(value, is_leaf=lambda part: isinstance(part, (tuple, *CONTAINERS)) and len(part) > FEW)


def _version(part: Any) -> int | None:
    return part._version if isinstance(part, Tensor) and not part.is_inference() else None


def _copy(part: Any) -> Any:
    """A copy without autograd's history: what is computed again gives the first pass the tensors that it saved, no more."""
    if not isinstance(part, Tensor):
        return copied(part) if isinstance(part, _COPIED) else part
    if part.numel() and part.layout == torch.strided and not part.untyped_storage().nbytes():
        return part  # a view of a weight that is not gathered any more
    return part.detach().clone().requires_grad_(part.requires_grad)


def _differs(before: Any, version: int | None, copy: Any, now: Any) -> bool:
    return now is not before or (not same(copy, now) if version is None else now._version != version)

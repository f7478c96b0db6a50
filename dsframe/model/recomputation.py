"""Activation checkpointing: blocks are recomputed in the backward pass."""

from __future__ import annotations

import dis
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache, wraps
from types import CellType, CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from dsframe.errors import TaskError
from dsframe.model.user_spaces import ABSENT, Space, attributes, code_of, names_of, outside
from dsframe.model.user_state import Generators, codes_in, generators_of
from dsframe.values import CONTAINERS, COUNTERS, ELEMENTS, copied, same


def recompute(block: nn.Module) -> None:
    """Keeps only the inputs of ``block`` and recomputes the rest in the backward pass (Chen et al. 2016, arXiv
    1604.06174). Replaces the method instead of wrapping the module, so names do not change."""
    forward, again = block.forward, checkpoint_function(block)

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return again(forward, *args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    block.forward = checkpointed


def checkpoint_function(module: nn.Module) -> Callable[..., Any]:
    """Returns torch's ``checkpoint`` for functions that run parts of ``module``, with the same autocast and state.

    During recomputation this state has its values from before the first pass, and changes are discarded: buffers
    (BatchNorm's statistics, a spectral norm's vectors), plain values in attributes, globals and classes of the user's
    files, and generators of NumPy, Python and the block. Other state shows in different outputs, which are refused.
    """
    state = _UserState(module)

    def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        taken = state.taken()
        if taken.looks:
            function = _Compared(function, state.block)
        return checkpoint(
            function,
            *args,
            use_reentrant=False,
            early_stop=not taken.looks,
            context_fn=lambda: (taken.watched(), taken),
            **kwargs,
        )

    return recomputed


_SAMPLE = 4096
"""Number of output elements that are compared."""
_ROUNDING = 16
"""Allowed difference, in rounding errors of the largest element: GPUs may sum in another order."""


class _Compared:
    """A function that raises TaskError if its outputs differ from those of the first call."""

    def __init__(self, function: Callable[..., Any], block: str) -> None:
        self._function, self._block = function, block
        self._first: list[Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._function(*args, **kwargs)
        now = [
            _sample(leaf) for leaf in tree_flatten(outputs)[0] if type(leaf) is Tensor and leaf.layout == torch.strided
        ]
        if self._first is None:
            self._first = now
        elif not all(map(_alike, self._first, now)):
            raise TaskError(
                f"a recomputed {self._block} returns other numbers when it computes again: it reads what a forward pass changes, "
                "its own or the model's, and what cannot be put back; keep it in buffers of the block, and let the model change it "
                "after a step (Hooks.on_step), or leave activation_checkpointing out"
            )
        return outputs


def _sample(output: Tensor) -> Tensor:
    numbers = output.detach().flatten()
    return numbers[:: -(-len(numbers) // _SAMPLE) or 1].clone()


def _alike(before: Tensor, now: Tensor) -> bool:
    if not before.is_floating_point() or before.shape != now.shape:
        return torch.equal(before, now)
    most = before.nan_to_num().abs().max() if len(before) else 0
    return torch.allclose(
        before, now, rtol=0, atol=float(most) * _ROUNDING * torch.finfo(before.dtype).eps, equal_nan=True
    )


_FULL_PASSES = 16
"""The first passes of a block that inspect all of its state. Later ones inspect what has changed, and all if their
number is a power of 2."""
_FIRST = 2
"""Number of passes whose large tensors are copied: the first may create them, and the second change them in place."""


@lru_cache(4096)
def _read_by(code: CodeType) -> frozenset[str]:
    """Returns the names and texts in ``code``, without names that are only written."""
    steps = (step for inner in codes_in(code) for step in dis.get_instructions(inner))
    read = (step.argval for step in steps if not step.opname.startswith(("STORE_", "DELETE_")))
    return frozenset(name for name in read if isinstance(name, str))


class _UserState:
    """The state that a block's code may change, and whether it draws from the process's generators."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self._passes, self._draws, self._suspected = module, 0, False, 0
        self.block = type(module).__name__  # before FSDP replaces the class
        self.read = frozenset[str]()  # names; a value for a log is only written
        self.norms = set[int]()  # the ids of their buffers; BatchNorm's kernels do not increment versions
        self._places: list[tuple[Space, str]] | None = None
        self.generators: list[Any] = []
        self.changing = set[tuple[int, str]]()

    def taken(self) -> _StateBefore:
        """Returns the state before the next forward pass."""
        self._passes = number = self._passes + 1
        whole = number <= _FULL_PASSES or number & (number - 1) == 0
        spaces, places = list[Space](), self._places
        if whole or places is None:
            spaces = self._find_spaces()
            places = [(space, key) for space in spaces for key in self.keys(space) if whole or self._moves(space, key)]
            self._places = None if whole else places
        held = [_Held(space, key, number <= _FIRST or self._changed(space, key)) for space, key in places]
        return _StateBefore(self, held, spaces if whole else [], self._draws or whole, number)

    def _find_spaces(self) -> list[Space]:
        """Returns the spaces to inspect, collected each time: objects in attributes may be gone later."""
        modules = list(self.module.modules())
        self.generators = generators_of(modules)
        names, self.read = names_of(modules), frozenset[str]().union(*map(_read_by, code_of(modules)))
        self.norms = {id(owner._buffers) for owner in modules if isinstance(owner, _NormBase)}
        buffers = [
            Space(owner._buffers, names.union(owner._buffers), "{}", holds_buffers=True)
            for owner in modules
            if isinstance(owner._buffers, dict)  # not torch.jit's
        ]
        return [*buffers, *attributes(self.module), *outside(modules)]

    def _changed(self, space: Space, key: str) -> bool:
        return (id(space.owner), key) in self.changing

    def _moves(self, space: Space, key: str) -> bool:
        """Returns True if later passes inspect the value, because it has changed or the inspection is cheap."""
        is_scalar = isinstance(space.owner, (dict, type)) and isinstance(space.values()[key], _SCALARS)
        return space.holds_buffers or is_scalar or self._changed(space, key)

    def keys(self, space: Space) -> list[str]:
        """Returns the names of plain values; others cannot be copied."""
        values, whole = space.values(), space.holds_buffers or isinstance(space.owner, CellType)
        there = values.keys() & (space.names if whole else space.names & self.read)
        return [key for key in there if isinstance(values[key], _PLAIN) or type(values[key]) in CONTAINERS]

    def drew(self, number: int) -> None:
        """Records that NumPy's or Python's generator moved in pass ``number``. Raises TaskError if it moved twice
        (another thread may have drawn once) and earlier passes may have been recomputed with other numbers."""
        if number > _FULL_PASSES and not self._draws:
            self._suspected = number
        elif 0 < number - self._suspected <= _FULL_PASSES < self._suspected:
            raise TaskError(
                f"a recomputed {self.block} draws with NumPy or random only in some steps, and would draw other "
                "numbers when it computes again; draw in each forward pass, or leave activation_checkpointing out"
            )
        self._draws = True


_SCALARS = (int, float, complex, str, bytes, np.generic, type(None))
_PLAIN = (*_SCALARS, Tensor, np.ndarray, tuple, *COUNTERS)


class _StateBefore:
    """Values and generators before a forward pass; afterwards those that the pass has changed. A context for
    recomputation: entered once for each backward pass through a block with several outputs."""

    def __init__(self, state: _UserState, held: list[_Held], spaces: list[Space], looks: bool, number: int) -> None:
        self._state, self._changed, self.looks, self._number = state, held, looks, number
        self._spaces = [(space, set(space.values())) for space in spaces]
        self._generators: Generators | None = Generators(state.generators, process=looks)
        self._inside = list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._inside.append(self._as_before())
        self._inside[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inside.pop().__exit__(*error)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Encloses the first pass, to find what it changes."""
        yield
        self._changed = [held for held in self._changed if held.changed(self._state.norms)]
        for held in self._changed:
            self._state.changing.add((id(held.space.owner), held.key))
            if held.ended():
                raise TaskError(
                    f"a recomputed {self._state.block} changes its large {held.key} only in some steps, and what "
                    "it was is not known any more; change it in each forward pass, or leave activation_checkpointing out"
                )
        for space, known in self._spaces:
            come = [key for key in self._state.keys(space) if key not in known]
            self._changed += [_Held(space, key, is_there=False) for key in come]
        self._spaces = []
        if self._generators is not None and self._generators.process_changed():
            self._state.drew(self._number)
        elif self._generators is not None and not self._generators.changed():
            self._generators = None

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Restores copies for the second pass, which it may change like the first pass did."""
        generators = Generators(self._state.generators, process=self.looks) if self._generators else None
        if self._generators:
            self._generators.put_back(process=True)
        now = [(held, held.space.values().get(held.key, ABSENT)) for held in self._changed]
        twins = dict[int, Any]()
        for held in self._changed:
            held.space.put(held.key, held.twin(twins))
        try:
            yield
        finally:
            for held, value in now:
                held.space.put(held.key, value)
            if generators:
                generators.put_back(process=True)


_LEAF = tree_flatten(0)[1]
_FEW = 100
"""Maximum number of entries in a copied container."""
_SMALL = 1 << 16
"""Maximum number of elements in a tensor or array that is copied before each pass."""


class _Held:
    """A value before a forward pass; after the pass, copies of it without autograd's history."""

    def __init__(self, space: Space, key: str, copies: bool = False, *, is_there: bool = True) -> None:
        self.space, self.key = space, key
        self._value: Any = space.values().get(key, ABSENT) if is_there else ABSENT
        self._id, (self._parts, self._spec) = id(self._value), _mutable_parts(self._value)
        self._ids, self._versions = [id(part) for part in self._parts], [_version(part) for part in self._parts]
        most = (math.inf if space.holds_buffers else ELEMENTS) if copies else _SMALL
        self._is_copied = [_elements(part) <= most for part in self._parts]
        self._copies = [
            _copy(part) if is_copied else part.detach() if isinstance(part, Tensor) else part
            for part, is_copied in zip(self._parts, self._is_copied, strict=True)
        ]

    def changed(self, norms: set[int]) -> bool:
        """Returns True if the value has been replaced or its content has changed."""
        now = self.space.values().get(self.key, ABSENT)
        if now is not self._value or id(self.space.owner) in norms:
            return True
        parts, spec = _mutable_parts(now)
        return spec != self._spec or any(map(_differs, self._parts, self._versions, self._copies, parts))

    def ended(self) -> bool:
        """Releases the value. Returns True if a part was changed and not copied."""
        before = zip(self._parts, self._versions, self._is_copied, strict=True)
        lost = any(not is_copied and _version(part) != version for part, version, is_copied in before)
        if self._spec is not None:
            self._value, self._parts = None, []
        return lost

    def twin(self, twins: dict[int, Any]) -> Any:
        """Returns a copy of the former value, the same for a value in two places: ``twins`` has copies by id."""
        if self._spec is None:
            return self._value
        for identity, kept in zip(self._ids, self._copies, strict=True):
            if identity not in twins:
                twins[identity] = _copy(kept)
        parts = [twins[identity] for identity in self._ids]
        return twins.setdefault(self._id, tree_unflatten(parts, self._spec))


def _mutable_parts(value: Any) -> tuple[list[Any], TreeSpec | None]:
    """Returns the mutable parts of a value, also of small containers."""
    if isinstance(value, (Tensor, np.ndarray, *COUNTERS)):
        return [value], _LEAF
    if (isinstance(value, tuple) or type(value) in CONTAINERS) and len(value) <= _FEW:
        with suppress(RecursionError):  # a list in itself
            parts, spec = tree_flatten(value)
            return (parts, spec) if len(parts) <= 10 * _FEW else ([], None)
    return [], None


def _version(part: Any) -> int | None:
    return part._version if isinstance(part, Tensor) and not part.is_inference() else None


def _elements(part: Any) -> float:
    if isinstance(part, Tensor):
        is_released = part.layout == torch.strided and part.numel() and not part.untyped_storage().nbytes()
        return math.inf if is_released else part.numel()
    return part.size if isinstance(part, np.ndarray) else 0


def _copy(part: Any) -> Any:
    """Returns a copy without autograd's history, which requires a gradient if the original did: recomputation then
    saves the same tensors for the backward pass."""
    if isinstance(part, Tensor):
        if not part.requires_grad:
            return part.detach().clone()
        with torch.enable_grad():
            return part.detach().requires_grad_().clone()
    return copied(part) if isinstance(part, (np.ndarray, set, Counter, *COUNTERS)) else part


def _differs(before: Any, version: int | None, kept: Any, now: Any) -> bool:
    return now is not before or (not same(kept, now) if version is None else now._version != version)

"""Random numbers of a forward pass that belong to a sample, not to a rank: "per_sample_randomness".

Otherwise each rank draws dropout masks from its own generator, and results depend on the number of ranks. Here every
number is a pure function of (seed, step, row of the global batch, number of the draw in the pass), by the generator of
``dsframe.data.source``. A draw without dimensions is the same for the whole step.

torch's functions are intercepted where Python calls them, but not inside each other (torch 2.13,
``torch/overrides.py``). If torch's generator has changed after the pass, something else drew from it, which is an
error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dsframe.data.source import draw, draws
from dsframe.errors import TaskError

REMEDY = (
    'remove "per_sample_randomness", or draw with torch.rand, randn, rand_like, randn_like, bernoulli or nn.Dropout'
)


_STRIDES = (0x9E3779B97F4A7C1, 0x3C6EF372FE94F82B, 0x1B873593CC9E2D51, 0x2545F4914F6CDD1D, 0x27D4EB2F165667C5)
"""Unrelated odd numbers. A number's position in a sample is the sum of its coordinates times these, in 64 bits."""


def _generator(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class DrawTrial:
    """Checks whether the first training forward pass uses torch's generator. No cost afterwards."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.moved = False
        """True if the model has drawn."""
        self._before: Tensor | None = None

        def begin(model: nn.Module, _: Any) -> None:
            if model.training and torch.is_grad_enabled():
                self._before = _generator(device)

        def end(*_: Any) -> None:
            if self._before is None:
                return
            self.moved = not torch.equal(self._before, _generator(device))
            for hook in hooks:
                hook.remove()

        hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]


class DoesNotFitError(TaskError):
    """The numbers of a draw belong to no sample."""


class _Draws(TorchFunctionMode):
    """Replaces torch's random functions by functions of the sample."""

    def __init__(self, seed: int, size: int, device: torch.device) -> None:
        super().__init__()
        self._seed, self._size, self._device = seed, size, device
        self._rows: range | Tensor = range(size)
        self._step = self._draw = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the replacement of ``function`` if there is one."""
        ours = _DRAWS.get(function)
        if ours is None or (kwargs or {}).get("generator") is not None:
            return function(*args, **(kwargs or {}))
        return ours(self, *args, **(kwargs or {}))

    def uniform(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns numbers in [0, 1): float32 with 24 bits, float64 with 53, other types rounded from float32.

        Raises DoesNotFitError if the first dimension is not a multiple of the micro-batch size.
        """
        self._draw += 1
        if not shape:
            sample: tuple[int, ...] = ()
            first = torch.full((1,), -1, device=device)
        elif shape[0] and shape[0] % self._size == 0:
            sample = (shape[0] // self._size, *shape[1:])
            first = self._numbers(device)
        else:
            raise DoesNotFitError(
                f"per_sample_randomness: the model draws numbers of shape {list(shape)}, whose first dimension is not that of "
                f"the micro-batch ({self._size}), so that they belong to no sample; {REMEDY}"
            )
        positions = draws(self._seed, self._step, first, self._draw)
        for dimension, size in enumerate(sample):  # by coordinates, so that padding to another length changes no number
            positions = positions[..., None] + torch.arange(size, device=device) * _STRIDES[dimension % len(_STRIDES)]
        bits = draws(self._seed, 0, positions, self._draw).reshape(shape)
        if dtype == torch.float64:
            return (bits >> 11 & (1 << 53) - 1).double() * 2.0**-53
        return ((bits >> 40 & (1 << 24) - 1).float() * 2.0**-24).to(dtype)

    def _numbers(self, device: torch.device) -> Tensor:
        """Returns the row numbers; a range is created on the device, without a copy."""
        rows = self._rows
        return torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, range) else rows.to(device)

    def normal(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns normal numbers, mean 0 and deviation 1, by the Box-Muller method."""
        exact = dtype if dtype == torch.float64 else torch.float32
        radius = (-2.0 * torch.log1p(-self.uniform(shape, exact, device))).sqrt()
        return (radius * torch.cos(2.0 * math.pi * self.uniform(shape, exact, device))).to(dtype)

    def like(self, tensor: Tensor, normal: bool = False) -> Tensor:
        """Returns numbers with the shape, type and device of ``tensor``."""
        return (self.normal if normal else self.uniform)(tensor.shape, tensor.dtype, tensor.device)


class SampleDraws(_Draws):
    """Random numbers for a model's forward passes in training. One instance per rank."""

    def __init__(self, model: nn.Module, seed: int, micro_batch_size: int, device: torch.device) -> None:
        super().__init__(seed, micro_batch_size, device)
        self._before: Tensor | None = None
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, always_call=True)

    def at(self, step: int, row: int) -> None:
        """Sets the step (from 0) of the next forward pass, and the number of its first row in the global batch."""
        self._step, self._rows = step, range(row, row + self._size)

    def uniform(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As in the base class, but raises TaskError inside a recomputed block."""
        _refuse_recomputation()
        return super().uniform(shape, dtype, device)

    def _begin(self, model: nn.Module, _: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._draw, self._before = 0, _generator(self._device)
            self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: Any) -> None:
        if self._before is None:
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        before, self._before = self._before, None
        self._refuse_moved(before, "model", "the dropout of nn.LSTM or nn.MultiheadAttention")

    @contextmanager
    def of_loss(self) -> Iterator[None]:
        """Context for the loss of the last forward pass's micro-batch."""
        before = _generator(self._device)
        with self:
            yield
        self._refuse_moved(before, "loss", "torch.randperm or torch.multinomial")

    def _refuse_moved(self, before: Tensor, part: str, such_as: str) -> None:
        if not torch.equal(before, _generator(self._device)):
            raise TaskError(
                f"per_sample_randomness: the {part} draws random numbers inside a function of torch's that dsframe cannot give "
                f"to samples, such as {such_as}; {REMEDY}"
            )


class RowDraws(_Draws):
    """Random numbers for ``collate``, or for model, loss and metrics of an evaluation.

    They are the same each time. Draws that belong to no sample are left to torch.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, 1, device)
        self.drawn = False
        """True if anything was drawn."""
        self.left_out = False
        """True if a draw belonged to no sample or used a generator of the task, unless every batch draws the same
        numbers, for example because the generator is seeded each time."""
        self._of_first: list[tuple[bytes, torch.Size]] | None = None
        """The first batch's draws that belong to no sample: generator state and shape."""
        self._of_batch: list[tuple[bytes, torch.Size]] = []

    def of(self, data: int, samples: range | Tensor) -> RowDraws:
        """Context for the batch of ``samples`` of data set number ``data``."""
        return self._at(_EVALUATION + data, samples)

    def collating(self, rows: Sequence[tuple[int, int]]) -> RowDraws:
        """Context for the batch of ``rows``, each an epoch and an index."""
        bits = (draw(self._seed, epoch, index, _COLLATE) >> 1 for epoch, index in rows)
        return self._at(0, torch.tensor(list(bits)))

    def _at(self, step: int, rows: range | Tensor) -> RowDraws:
        self._step, self._rows, self._size, self._draw = step, rows, len(rows), 0
        self._of_first = self._of_first or self._of_batch or None
        self._of_batch = []
        return self

    def uniform(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draws only one number per row: a multiple of few rows may be another dimension, such as time."""
        self.drawn = True
        if shape and shape[0] != self._size:
            raise DoesNotFitError
        return super().uniform(shape, dtype, device)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the replacement if the draw belongs to samples, else ``function``."""
        generator = (kwargs or {}).get("generator")
        if function in _DRAWS and generator is not None:
            return self._of_no_sample(generator, function, args, kwargs)
        try:
            return super().__torch_function__(function, types, args, kwargs)
        except DoesNotFitError:
            return self._of_no_sample(torch.default_generator, function, args, kwargs or {})

    def _of_no_sample(self, generator: torch.Generator, function: Any, args: Any, kwargs: Any) -> Any:
        """Calls ``function``. Sets ``left_out`` unless every batch draws the same numbers, independent of its rows."""
        self.drawn, state = True, generator.get_state().numpy().tobytes()
        drawn = function(*args, **kwargs)
        self._of_batch.append((state, drawn.shape))
        same = self._of_first is None or self._of_batch == self._of_first[: len(self._of_batch)]
        self.left_out |= not same or drawn.shape[:1] == (self._size,) != (1,)
        return drawn


_COLLATE = 0x636F6C6C  # a separate stream of draws
_EVALUATION = 0x6576616C << 32  # more steps than any training has


def _refuse_recomputation() -> None:
    """Raises TaskError inside a block that the backward pass recomputes.

    Both kinds of ``torch.utils.checkpoint`` run a block either without gradients or with saved-tensor hooks.
    """
    if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise TaskError(
            "per_sample_randomness: the model draws random numbers inside a block that is recomputed in the backward pass "
            '(activation checkpointing), which would draw others; remove "per_sample_randomness" or the recomputation'
        )


def _dropout(leading: int | None = None) -> Callable[..., Tensor]:
    """Returns a dropout of numbers, or of channels if the mask has only the ``leading`` dimensions."""

    def drop(its: _Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        shape = input.shape if leading is None else torch.Size([*input.shape[:leading], *[1] * (input.ndim - leading)])
        kept = its.uniform(shape, torch.float32, input.device) >= p
        scale = kept.to(input.dtype) / ((1.0 - p) or 1.0)  # nothing is kept if p is 1
        return input.mul_(scale) if inplace else input * scale

    return drop


def _factory(normal: bool) -> Callable[..., Tensor]:
    def make(its: _Draws, *size: Any, dtype: Any = None, device: Any = None, **others: Any) -> Tensor:
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size or others.pop("size"))
        where = torch.empty(0, dtype=dtype, device=device)
        drawn = (its.normal if normal else its.uniform)(shape, where.dtype, where.device)
        return drawn.requires_grad_(bool(others.get("requires_grad")))

    return make


def _like(normal: bool) -> Callable[..., Tensor]:
    def make(its: _Draws, input: Tensor, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        make_numbers = its.normal if normal else its.uniform
        return make_numbers(input.shape, dtype or input.dtype, torch.device(device or input.device))

    return make


def _normal(its: _Draws, mean: Any = 0.0, std: Any = 1.0, *size: Any, **_: Any) -> Tensor:
    given = [value for value in (mean, std) if isinstance(value, Tensor)]
    like = torch.broadcast_tensors(*given)[0] if given else torch.empty(size[0])  # type: ignore[no-untyped-call]
    drawn: Tensor = its.like(like, normal=True) * std + mean
    return drawn


def _integers(its: _Draws, *bounds: Any, dtype: Any = torch.int64, device: Any = None, **named: Any) -> Tensor:
    *ends, size = [*bounds, named["size"]] if "size" in named else bounds
    low, high = named.get("low", ends[0] if len(ends) == 2 else 0), named.get("high", ends[-1] if ends else None)
    where = torch.device(device) if device is not None else torch.empty(0).device
    drawn: Tensor = its.uniform(torch.Size(size), torch.float64, where) * (high - low) + low
    return drawn.floor().to(dtype)


def _bernoulli(its: _Draws, input: Tensor, p: float | None = None, **_: Any) -> Tensor:
    return (its.uniform(input.shape, torch.float32, input.device) < (input if p is None else p)).to(input.dtype)


def _attention(
    its: _Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Tensor:
    """Replaces torch's fused attention: with dropout, runs the four steps of its documentation."""
    if dropout_p == 0.0:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, **named)
    scale = named.get("scale")
    if named.get("enable_gqa"):
        key, value = (tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3) for tensor in (key, value))
    weights = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        weights = weights.masked_fill(~attn_mask, -math.inf) if boolean else weights + attn_mask
    return _dropout()(its, weights.softmax(-1), dropout_p) @ value


_DRAWS: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout(),
    functional.dropout1d: _dropout(2),
    functional.dropout2d: _dropout(2),
    functional.dropout3d: _dropout(2),
    torch.dropout: lambda its, input, p, train: _dropout()(its, input, p, train),
    functional.scaled_dot_product_attention: _attention,
    torch.rand: _factory(normal=False),
    torch.randn: _factory(normal=True),
    torch.rand_like: _like(normal=False),
    torch.randn_like: _like(normal=True),
    torch.randint: _integers,
    torch.randint_like: lambda its, input, *ends, dtype=None, device=None, **named: _integers(
        its, *ends, input.shape, dtype=dtype or input.dtype, device=device or input.device, **named
    ),
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: lambda its, tensor, p=0.5, **_: tensor.copy_(
        its.uniform(tensor.shape, torch.float32, tensor.device) < p
    ),
    Tensor.uniform_: lambda its, tensor, *ends, **named: _between(tensor, its.like(tensor), *ends, **named),
    Tensor.normal_: lambda its, tensor, mean=0.0, std=1.0, **_: tensor.copy_(
        its.like(tensor, normal=True) * std + mean
    ),
    Tensor.exponential_: lambda its, tensor, lambd=1.0, **_: tensor.copy_(-torch.log1p(-its.like(tensor)) / lambd),
}
"""torch's random functions -> their replacements."""


def _between(tensor: Tensor, numbers: Tensor, low: float = 0.0, high: float = 1.0, **named: float) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    return tensor.copy_(numbers * (high - low) + low)

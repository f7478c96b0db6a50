"""Gradient buckets: flat tensors, each reduced as soon as the backward pass has filled it.

For libraries that only have an asynchronous all-reduce. Autograd sets a parameter's ``grad`` without a copy; the whole
bucket is then copied into its flat tensor at once, and ``grad`` becomes a view of it. So nothing is copied back,
nothing has to be zeroed, and the library receives one tensor per bucket instead of one per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dsframe.errors import EngineError
from dsframe.values import elements

Start = Callable[[str, Tensor], Callable[[], None]]
"""Starts the in-place reduction of a flat tensor under a unique name. Returns a function that waits for it."""


LEAST_BYTES, MOST_BYTES = 2**20, 2**26
"""The minimum is also what torch.compile requires of DDP's buckets (``torch._dynamo.backends.distributed``)."""


def usual_bytes(whole: float) -> int:
    """Returns the default bucket size in bytes: a quarter of ``whole``, so that three quarters can be sent during the
    backward pass. Limits keep overhead per message and the wait for the last bucket small."""
    return int(min(max(whole / 4, LEAST_BYTES), MOST_BYTES))


@dataclass
class _Bucket:
    name: str
    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    missing: set[int] = field(default_factory=set)
    """Ids of the parameters whose gradient has not arrived in this step."""
    wait: Callable[[], None] | None = None


class Buckets:
    """The gradients of ``parameters``, which all ranks pass in the same order, so that all make the same buckets."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], start: Start, *, bytes_each: int | None, overlaps: bool = True
    ) -> None:
        """``bytes_each``: limit of a bucket, except for a larger parameter (None: ``usual_bytes``). ``overlaps``: True
        if gradients come from a backward pass; otherwise all are reduced in :meth:`finish`."""
        self._start = start
        self._held = False
        self._ended = True
        # The backward pass reaches the last layers first.
        backwards = list(reversed(parameters))
        if bytes_each is None:
            bytes_each = usual_bytes(sum(parameter.nbytes for parameter in parameters))
        cut = _by_size(backwards, bytes_each)
        self._buckets = [_bucket(f"gradients.{number}", members) for number, members in enumerate(cut)]
        self._of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        hooked = parameters if overlaps else ()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._came) for parameter in hooked]  # type: ignore[no-untyped-call]
        self._expect_all()

    def __len__(self) -> int:
        return len(self._buckets)

    def remove(self) -> None:
        """Removes the hooks from the parameters, which may be used in other buckets."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Called before a step's first backward pass. Drops the gradients of a step that an exception aborted.
        **Collective** if that step had sent a bucket (all ranks must have aborted at the same point): waits for it."""
        if not self._ended:
            for bucket in self._buckets:
                if bucket.wait is not None:
                    bucket.wait()
                for parameter in bucket.parameters:
                    parameter.grad = None
            self._expect_all()
        self._ended = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Encloses backward passes whose gradients are not reduced yet."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def finish(self) -> None:
        """**Collective.** Reduces what no hook has started, with zeros for missing gradients, and waits for all."""
        for bucket in self._buckets:
            if bucket.wait is None:
                self._launch(bucket)
        for bucket in self._buckets:
            assert bucket.wait is not None
            bucket.wait()
        self._expect_all()
        self._ended = True

    def _expect_all(self) -> None:
        for bucket in self._buckets:
            bucket.missing, bucket.wait = {id(parameter) for parameter in bucket.parameters}, None

    def _came(self, parameter: Tensor) -> None:
        if self._held:
            return
        bucket = self._of[id(parameter)]
        if id(parameter) not in bucket.missing:
            raise EngineError(
                "a parameter got its gradient in two parts in one backward pass, as torch's reentrant checkpointing does; "
                "use_reentrant=False gives it in one"
            )
        bucket.missing.remove(id(parameter))
        if not bucket.missing:
            self._launch(bucket)

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        pairs = [(p.grad, view) for p, view in zip(bucket.parameters, bucket.views, strict=True)]
        filled = [(gradient, view) for gradient, view in pairs if gradient is not None]
        if len(filled) < len(pairs):
            bucket.flat.zero_()
        if filled:
            torch._foreach_copy_([view for _, view in filled], [gradient for gradient, _ in filled])
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            parameter.grad = view
        bucket.wait = self._start(bucket.name, bucket.flat)


def _by_size(parameters: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    cut: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if not cut or parameter.nbytes > room:
            cut.append([])
            room = limit
        cut[-1].append(parameter)
        room -= parameter.nbytes
    return cut


def _bucket(name: str, parameters: list[nn.Parameter]) -> _Bucket:
    size, like = elements(parameters), parameters[0]
    flat = torch.zeros(size, dtype=like.dtype, device=like.device)
    views, start = [], 0
    for parameter in parameters:
        piece = flat[start : start + parameter.numel()]
        dense = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        # Use the parameter's memory format: channels-last gradients are copied and used without conversion.
        laid = dense == parameter.numel()
        views.append(piece.as_strided(parameter.shape, parameter.stride()) if laid else piece.view(parameter.shape))
        start += parameter.numel()
    return _Bucket(name, parameters, flat, views)

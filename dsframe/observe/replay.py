"""What a step's collectives take: one more step after the training writes down what is sent, and the same is sent again, alone.

The training that is timed is not touched, and its result is saved already. What is sent again is sent as the step sends it, by
the same process groups and in the same sizes, with zeros: collectives of torch.distributed one after the other, each waited
for; sends and receives, and what Horovod gets (it takes that one after the other itself, unless it is autotuned), waited for at
the end. Nobody waits for a slower rank's computation then, and nothing else is computed: it is what the network and the copies
take by themselves. As a share of a step's time it is what could be hidden behind computation at best, and what a faster network
could save at most.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from dsframe.cluster.exchange import all_gather_text
from dsframe.engine import Engine
from dsframe.observe.communication import Communication
from dsframe.observe.observer import Batches, Observer, Stretch
from dsframe.text import reason

PASSES = 5
"""The median of so many, after one that does not count."""
SECONDS = 2.0
"""Fewer passes where they would take longer than this."""


@dataclass(frozen=True)
class _Like:
    """A tensor's looks."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    arguments: Any
    waits: bool
    """Whether the next call is made only when this one has ended."""


class Recording(Communication):  # type: ignore[no-untyped-call]
    """Counts what is sent, and keeps what is needed to send it again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def seen(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, waits: bool
    ) -> None:
        """Keeps the call; of its tensors only what they look like, because some are freed before it is repeated."""
        like = tree_map_only(Tensor, lambda one: _Like(one.shape, one.dtype, one.device), (args, dict(kwargs)))
        self.calls.append(_Call(function, like, waits))

    def again(self, device: torch.device) -> Callable[[], None]:
        """What sends it all again, on this rank's part. Takes memory for the largest tensor of each type."""
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for leaf in tree_leaves([call.arguments for call in self.calls]):
            if isinstance(leaf, _Like):
                key = leaf.dtype, leaf.device
                sizes[key] = max(sizes.get(key, 0), prod(leaf.shape))
        zeros = {key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}

        def tensor(leaf: Any) -> Any:
            if not isinstance(leaf, _Like):
                return leaf
            return zeros[leaf.dtype, leaf.device][: prod(leaf.shape)].view(leaf.shape)

        ready = [(call, tree_map(tensor, call.arguments)) for call in self.calls]

        def send() -> None:
            later: list[Any] = []
            for call, (args, kwargs) in ready:
                result = call.function(*args, **kwargs)
                if call.waits:
                    _wait(result)
                else:
                    later.append(result)
            for result in later:
                _wait(result)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return send


def observer(stretch: Stretch) -> Observer:
    """Measures after the training."""
    return _Replay()


class _Replay(Observer):
    """``measure_communication``."""

    def results(self, engine: Engine, rate: float, batches: Batches) -> Mapping[str, Any]:
        """**Collective.** What a step sends, and what that takes, by one step more."""
        return {"communication": measure(engine, batches())}


def measure(engine: Engine, batches: Iterator[Any]) -> dict[str, Any]:
    """**Collective.** One more step of ``engine`` with ``batches``, counted, and its collectives alone, timed.

    ``sent_bytes``: by rank; ``calls``: of rank 0, by kind; ``seconds``: of all collectives of a step, on the slowest rank.
    What cannot be counted or repeated says why instead, as ``problem``.
    """
    try:
        return _measured(engine, batches)
    except Exception as error:  # the training went well: this is no reason to fail after it
        return {"problem": reason(error, 200)}


def _measured(engine: Engine, batches: Iterator[Any]) -> dict[str, Any]:
    with Recording() as sent:
        engine.train_step(batches)
    send = sent.again(engine.plan.device)
    times: list[float] = []
    passes = PASSES + 1
    while len(times) < passes:
        all_gather_text(engine, "")  # all ranks begin together
        began = time.perf_counter()
        send()
        slowest = max(map(float, all_gather_text(engine, repr(time.perf_counter() - began))))
        if not times:
            passes = 1 + max(1, min(PASSES, int(SECONDS / slowest)))
        times.append(slowest)
    return {
        "sent_bytes": [round(float(text)) for text in all_gather_text(engine, repr(sent.bytes_sent))],
        "calls": {kind: traffic.calls for kind, traffic in sorted(sent.by_kind.items())},
        "seconds": statistics.median(times[1:]) if sent.calls else 0.0,
    }


def _wait(result: Any) -> None:
    """Until a collective has ended, by what its call returned: a handle of Horovod's, torch's Work, or a tensor to come."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, int):
            sys.modules["horovod.torch.mpi_ops"].synchronize(leaf)
        elif isinstance(leaf, Tensor):
            torch.ops._c10d_functional.wait_tensor(leaf)  # returns at once where nothing is awaited
        elif isinstance(leaf, torch.ScriptObject):
            torch._C._distributed_c10d.Work.unbox(leaf).wait()

"""The evaluation of one model on all held-out samples, whatever the engine and the number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from dsframe.checkpoint import generators
from dsframe.cluster.exchange import aligned, all_gather_text, sum_rows
from dsframe.data import EvaluationLoader
from dsframe.data.source import Batch
from dsframe.engine import Engine
from dsframe.errors import TaskError
from dsframe.model import metric_objects
from dsframe.tasks.task import Sum, Task

_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""BatchNorm's, which training does not use (``dsframe.engine.dependences`` announces it)."""


class Evaluation:
    """Takes the task's metrics of an engine's model."""

    def __init__(
        self, engine: Engine, loader: EvaluationLoader, sign_of_life: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """``sign_of_life``: called before each batch. ``say``: rank 0's voice, silent on others."""
        self._engine, self._loader, self._sign_of_life, self._say = engine, loader, sign_of_life, say
        self._told = False

    @property
    def batches(self) -> int:
        """Batches of each rank."""
        return len(self._loader)

    def run(self, stops: Callable[[int], bool] = lambda batches: False) -> dict[str, float] | None:
        """**Collective.** Means over all held-out samples, the same on every rank; None where ranks agree to stop before.

        ``stops``: called with the number of batches done. Training does not see it: random generators are put back, so that
        a checkpoint from before the evaluation goes on as the run itself did.
        """
        device = self._engine.plan.device
        average = self._engine.plan.config.settings.ema
        kept = generators.capture(device)
        with self._engine.averaged() if average and average.evaluate else nullcontext():
            found = self.over(self._loader, self.batches, stops)
        results = None if found is None else self._results(found)
        generators.restore(kept, device)
        return results

    def try_out(self) -> None:
        """**Collective.** One batch a rank, before training: what is wrong with it shall not wait for the first epoch's end.

        Raises TaskError, too, where a schedule waits for a metric that there is not.

        Training does not see it: random generators are put back, and what the file asks to be compiled is not, for the compiler
        would take the training's batches for others of the same graph where theirs is another size.
        """
        plan = self._engine.plan
        device, compiled = plan.device, plan.config.settings.model.compile
        kept = generators.capture(device)
        watch = self._engine.built.watch
        with (
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
            watch.trial() if watch else nullcontext(),
        ):
            found = self.over([self._loader.first()], 1)
        with suppress(ArithmeticError, ValueError):  # of a few samples there may be nothing to divide by
            metrics = self._results(found or {})
            for follower in plan.followers.values():
                follower.check(metrics)
            best = (plan.config.settings.checkpoints.keep_best or "").partition(":")[0]
            if best and metrics and best not in metrics:
                raise TaskError(f"keep_best: no metric {best!r} in the evaluation; it has {', '.join(metrics)}")
        generators.restore(kept, device)

    def _results(self, found: Mapping[str, Sum]) -> dict[str, float]:
        """**Collective.** Returns what the task makes of its sums, and what its metric objects do."""
        computed = metric_objects.compute(self._engine)
        return {**finalized(self._engine.plan.task, found), **computed}

    def over(
        self,
        batches: Iterable[tuple[Batch, int]],
        count: int,
        stops: Callable[[int], bool] = lambda batches: False,
    ) -> dict[str, Sum] | None:
        """**Collective.** The task's sums over ``count`` ``batches``, as many on each rank; None where ranks agree to stop."""
        sums: dict[str, Sum] = {}
        metric_objects.reset(self._engine)
        with self._one_model(), self._engine.evaluating(count):
            for number, (batch, valid) in enumerate(batches):
                if number and stops(number):
                    return None
                self._sign_of_life()
                for name, value in self._engine.eval_step(batch, valid).items():
                    sums[name] = sums[name] + value if name in sums else value
        return totals(self._engine, sums)

    @contextmanager
    @torch.no_grad()
    def _one_model(self) -> Iterator[None]:
        """**Collective.** Every rank has the buffers of the first rank that holds them, and its own again afterwards.

        Weights are everybody's (but where ranks average them now and then). BatchNorm's statistics are of the samples that a rank
        has seen, so that without this each rank would evaluate a model of its own, and none the one that an export gives, which is
        rank 0's.
        """
        kept = {name: buffer.to("cpu", copy=True) for name, buffer in self._engine.buffers().items()}
        differ = _take_over(self._engine, kept)
        own = ", ".join(name for name in differ if name.rpartition(".")[2] not in _STATISTICS)
        if own and not self._told:
            self._say(f"warning: buffer {own} differs between ranks; results may depend on the number of processes")
            self._told = True
        try:
            yield
        finally:
            for name, buffer in self._engine.buffers().items():
                if name in kept and not torch.equal(buffer.cpu(), kept[name]):
                    _put(kept[name], buffer)


def totals(engine: Engine, sums: Mapping[str, Sum]) -> dict[str, Sum]:
    """**Collective.** Exact sums over all ranks, float64 on the CPU; a rank that did not see a metric takes part with zeros."""
    names = sorted({name for text in all_gather_text(engine, json.dumps(sorted(sums))) for name in json.loads(text)})
    table = torch.zeros(len(names), 2, dtype=torch.float64, device=engine.plan.device)
    for row, name in enumerate(names):
        if name in sums:
            table[row, 0], table[row, 1] = sums[name].total.double(), float(sums[name].count)
    total = engine.sum_over_ranks(table.reshape(-1)).reshape(len(names), 2).cpu()
    return {name: Sum(*total[row]) for row, name in enumerate(names)}


def finalized(task: Task, sums: Mapping[str, Sum]) -> dict[str, float]:
    """Returns what the task makes of the sums over all samples. Raises TaskError where that is no mapping from names to numbers."""
    metrics = task.finalize(sums)
    if not isinstance(metrics, Mapping):
        raise TaskError(f"{type(task).__name__}.finalize returned {type(metrics).__name__}; return numbers by name")
    values = {}
    for name, value in metrics.items():
        try:
            values[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TaskError(
                f"{type(task).__name__}.finalize: {name!r} is {type(value).__name__}, not a number"
            ) from None
    return values


def _take_over(engine: Engine, kept: Mapping[str, Tensor]) -> Collection[str]:
    """**Collective.** Every buffer that differs between ranks from its source, to the last bit. ``kept``: this rank's, on a CPU.

    Returns the names of those that differed.
    """
    world = engine.plan.world
    if world.size == 1:
        return ()
    contents = {name: buffer.contiguous().reshape(-1).view(torch.uint8) for name, buffer in kept.items()}
    mine = {name: (content.numel(), xxh3_64_hexdigest(content.numpy().data)) for name, content in contents.items()}
    places, end = _row_spans([json.loads(text) for text in all_gather_text(engine, json.dumps(mine))])
    if not places:
        return ()
    row = torch.zeros(end, dtype=torch.uint8)
    for name, place in places.items():
        if place.source == world.rank:
            row[place.bytes] = contents[name]
    sum_rows(engine, row)
    for name, buffer in engine.buffers().items():
        if name in places and places[name].source != world.rank:
            content = row[places[name].bytes].clone()
            _put(content.view(buffer.dtype).reshape(buffer.shape), buffer)
    return places.keys()


def _put(content: Tensor, buffer: Tensor) -> None:
    """Copies in place. A forward pass may have given the ``buffer`` another size."""
    if buffer.shape != content.shape:
        buffer.resize_(content.shape)
    buffer.copy_(content)


@dataclass(frozen=True)
class _RowSpan:
    """Position of a buffer in the exchange row."""

    source: int
    """The first rank that holds it."""
    bytes: slice


def _row_spans(of_ranks: Sequence[Mapping[str, tuple[int, str]]]) -> tuple[dict[str, _RowSpan], int]:
    """Returns where each differing buffer lies in the exchange row, and the row's length in bytes. ``of_ranks``: by rank, the size
    and digest of each. A pipeline's stage holds its own layers' alone; what has other sizes on other ranks stays with each."""
    by_name: dict[str, dict[int, tuple[int, str]]] = {}
    for rank, held in enumerate(of_ranks):
        for name, (size, digest) in held.items():
            by_name.setdefault(name, {})[rank] = (size, digest)
    places: dict[str, _RowSpan] = {}
    end = 0
    for name, holders in by_name.items():
        source, (size, _) = next(iter(holders.items()))
        if len({*holders.values()}) > 1 and {each for each, _ in holders.values()} == {size}:
            places[name] = _RowSpan(source, slice(end, end + size))
            end += aligned(size)
    return places, end

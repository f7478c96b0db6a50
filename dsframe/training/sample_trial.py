"""Compares a few samples with two halves of them, through collate, model and loss, with random numbers assigned to
samples.

In evaluation this shows the kind of a loss if halves of the outputs do not: time as the first dimension, a loss inside
the model, targets of another length, a ``collate`` that mixes samples. In training, with the same samples on every
rank, it shows rows that depend on others, code that depends on the rank, and state that cannot be saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from dsframe.cluster.exchange import all_gather_json, by_value
from dsframe.data import Loader
from dsframe.data.datasets import StreamSource
from dsframe.data.fingerprint import digest
from dsframe.data.sample_draws import RowDraws
from dsframe.data.source import Batch
from dsframe.engine import Engine
from dsframe.engines import precision
from dsframe.errors import EngineError, TaskError, WorldError
from dsframe.host import generators
from dsframe.model import derivatives
from dsframe.model.weight_watch import WeightWatch
from dsframe.tasks.task import Sums, Task, gives, loss_and_terms
from dsframe.text import reason
from dsframe.training import halves, restore, user_values
from dsframe.values import tensors_of

_SAMPLES = 4
"""Maximum. Without gradients these take less memory than a training step, even if that has only one sample."""
_TOLERANCE = 3e-4
"""Relative. The same row differs by less in a batch of another size, also in TF32."""

ROWS_DEPEND = (
    "model or collate gives a row different outputs in different batches, so the training depends on the micro batch size "
    "(batch_dependent = True in the task says that it is meant)"
)
DEPENDS = (
    "so the training depends on the micro batch size (if it is a mean over items, such as labels that are not ignored, return "
    "their number, or the sum of their weights, from loss_weight(targets))"
)
NEITHER = f"loss is neither a mean nor a sum over rows, {DEPENDS}"
PADDED = (
    "rows are longer in a batch than alone, and their loss is another one there: the model sees padding, so the "
    "training depends on the micro batch size (mask it, or pad to one length, as dsframe.data.Pad(length=N) does)"
)


def is_needed(engine: Engine, loader: Loader, kind: str) -> bool:
    """Returns True if ``kind``, the result for halves of the outputs, is uncertain."""
    watch = engine.built.watch
    # Halves of the outputs are compared without gradients, where such a loss may omit terms.
    differentiates = watch is not None and bool(derivatives.line_of(engine.plan.task, watch.model))
    mixes = loader.regroups and not isinstance(loader.source, StreamSource)  # of which no row can be read again
    if loader.collate_draws or (kind in ("mean", "sum") and not (mixes or differentiates)):
        return False
    return _has_user_loss(engine)


def has_few_rows(engine: Engine) -> bool:
    """Returns True if halves are single rows: a loss with statistics over rows may be the mean of these."""
    return 1 < engine.plan.batch.micro_batch_size < _SAMPLES and _has_user_loss(engine)


def kind_of(
    engine: Engine, loader: Loader, step: int, share: int | None, *, training: bool = False, given: Batch | None = None
) -> tuple[str, str]:
    """**Collective.** Returns the kind or "", and a message or "". ``training``: use the model in training mode, and
    return "neither" only if rows depend on each other, not if halves of the same outputs show such a loss.
    ``share``: which micro-batch of all ranks in ``step`` (from 0) is tested, because its halves showed a loss that is
    neither; None: test a few samples of the first one. ``given``: this rank's, of a stream."""
    size, samples = engine.plan.batch.micro_batch_size, list[int]()
    if not isinstance(loader.source, StreamSource):
        indices = torch.cat([indices for _, indices in loader.sampler.global_batch(step)])
        samples = (indices % len(loader.source)).tolist()
    count = max(2, size // 2 * 2) if share is not None else 2 if size == 1 else _SAMPLES
    chosen = samples[(share or 0) * size :][:count]
    chosen = [*dict.fromkeys([*chosen, *range(count)])][:count]
    trial = _Trial(engine, loader, chosen, training=training, given=given)
    losses, why = trial.take()
    if losses is None or (training and trial.draws):
        return "", f'loss was not examined ({why}): where it is a sum over samples, write loss_is = "sum"'
    kind, watch = _kind_of_losses(engine, losses, wholes=1) if losses.kind != "neither" else "", engine.built.watch
    if not training and kind != "neither" and watch and not (watch.has_writes or mixes_rows(engine)):
        in_training, _ = kind_of(engine, loader, step, share, training=True)  # a model may compute its loss there alone
        kind = in_training if in_training in ("mean", "sum") else kind
    return kind, PADDED if kind == "neither" and len(trial.lengths) > 1 else ""


def refuse_other_numbers(engine: Engine, loader: Loader, batch: Batch, *, buffers_alike: bool, resumed: bool) -> str:
    """**Collective.** Runs the same samples on every rank, in training mode; of a stream, rows of ``batch``. Returns a
    message, or "". ``buffers_alike``: False if buffers other than BatchNorm's statistics differ between ranks. Raises
    TaskError if the losses of ranks differ, or if those of a ``resumed`` run would."""
    plan, watch = engine.plan, engine.built.watch
    if watch is None or plan.config.settings.model.compile or not _has_user_loss(engine):
        return ""
    given = batch if isinstance(loader.source, StreamSource) else None
    # At most as many rows as a training step, which has shown that they fit into memory; or two, if they make a batch.
    for size in (_SAMPLES,) if plan.batch.micro_batch_size >= _SAMPLES else (2, 1):
        trial = _Trial(engine, loader, [*range(size)], training=True, again=True, given=given)
        losses, _ = trial.take()
        if losses is not None:
            break
    near, whose = _tolerance(engine), type(plan.task).__name__
    moves = losses is not None and any(_differ(values[:2], near) for values in losses.of.values())
    local_losses = {} if losses is None or trial.draws else {name: values[0] for name, values in losses.of.items()}
    kind = "" if losses is None or mixes_rows(engine) else _kind_of_losses(engine, losses, wholes=2)
    if losses and losses.kind == kind == "neither":
        kind = NEITHER
    answers = all_gather_json(engine, [local_losses, sorted(trial.digests), moves, kind])
    of_ranks, digests, moving, kinds = zip(*answers, strict=True)
    if losses is None or any((not given and each != digests[0]) or len(each) > 1 for each in digests):
        return ""
    if (
        not given
        and all(of_ranks)
        and buffers_alike
        and any(_differ([row[name] for row in of_ranks], near) for name in of_ranks[0])
    ):
        shown = by_value([f"{sum(row.values()):.6g}" for row in of_ranks])
        raise TaskError(
            f"{whose}: the loss of the same samples is not the same on each rank ({shown}), so another number of ranks is another "
            "training. Let nothing in model, loss or a hook of a gradient depend on the rank or the host, nor such a hook draw"
        )
    if any(moving):
        text = "loss of the same samples changes with each call, by a state that is in no buffer and no attribute"
        if resumed:
            raise TaskError(
                f"{whose}: the {text}, and no checkpoint has it. Make it a buffer of the model; the number of the step is "
                "self.context.step in the task"
            )
        return f"{text}: this look has moved it, and no checkpoint has it"
    if not all(of_ranks):
        return ""
    if "neither" in kinds or NEITHER in kinds:
        return ROWS_DEPEND if "neither" in kinds else NEITHER
    line = _line_of_asking(engine) if engine.built.calls is not None else ""
    return f"code asks whether gradients are on ({line}); what it computes only then was not examined" if line else ""


def mixes_rows(engine: Engine) -> bool:
    """Returns True if task or model declare that rows depend on others, or if a test could not tell."""
    watch, plan = engine.built.watch, engine.plan
    if watch is None or plan.task.batch_dependent or plan.config.settings.model.compile or not _has_user_loss(engine):
        return True
    return any(isinstance(module, _BatchNorm) for module in watch.model.modules())


def _line_of_asking(engine: Engine) -> str:
    watch = engine.built.watch
    return derivatives.line_of(engine.plan.task, watch.model, derivatives.asks_for_gradients) if watch else ""


def _differ(losses: Sequence[float], tolerance: float) -> bool:
    return max(losses) - min(losses) > halves.tolerance_of(losses, tolerance) * max(map(abs, losses))


class _Trial:
    """A few samples, twice if ``again`` is set, and all halves of them."""

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        samples: list[int],
        *,
        training: bool = False,
        again: bool = False,
        given: Batch | None = None,
    ) -> None:
        """``given``: a batch whose first rows are the samples, if they cannot be read again."""
        self._given, self._halves = given, training or again
        self._engine, self._loader, self._samples, self._training = engine, loader, samples, training
        places = torch.arange(len(samples))
        ways = halves.halvings(len(samples)) if len(samples) > 1 else []
        self._wholes = 2 if again else 1
        self._parts = [places.tolist()] * self._wholes
        self._parts += [part.tolist() for first in ways for part in (places[first], places[~first])]
        """Positions in ``samples``."""
        self.draws = False
        """True if random numbers that belong to no sample were drawn on this rank."""
        self.lengths = set[tuple[torch.Size, ...]]()
        """Shapes of a row in the batches: several if rows are padded to the longest."""
        self.digests = set[str]()
        """One for each reading of all samples; data with a state give several."""

    def take(self) -> tuple[Losses | None, str]:
        """**Collective.** Returns the losses, or the reason why there are none. Has no side effects."""
        engine, loader = self._engine, self._loader
        watch, plan = engine.built.watch, engine.plan
        known = not isinstance(loader.source, StreamSource) and len(loader.source) > max(self._samples)
        if watch is None or not (known or self._given):
            return None, "the samples cannot be read again"
        losses, draws = Losses(engine, of_halves=self._halves), RowDraws(plan.seed, plan.device)
        models = list(watch.model.children()) if engine.built.losses else [watch.model]
        try:
            with (
                generators.kept(plan.device),  # reading may draw
                plan.task.context.evaluation(),  # without engine.evaluating: shards stay sharded
                training_mode(models, watch) if self._training else nullcontext(),
                warnings.catch_warnings(),  # torch.utils.checkpoint expects gradients
            ):
                warnings.simplefilter("ignore")
                for part, batch in zip(self._parts, self._batches(), strict=True):
                    self.lengths.add(tuple(_shape_of_row(leaf.shape, len(part)) for leaf in tensors_of(batch)))
                    before, others = generators.capture(plan.device), user_values.Generators(engine)
                    with restore.unmoved(engine, watch.model), watch.trial(), draws.of(0, torch.tensor(part)):
                        losses.add(batch, samples=len(part))
                        moved = before != generators.capture(plan.device) or others.changed()
                        self.draws |= draws.left_out or moved
        except (EngineError, WorldError):
            raise
        except Exception as error:  # for example a model for batches of one size
            first = error.__context__ or error  # a library's hooks may raise another after it
            return None, reason(first, 100)
        return losses, ""

    def _batches(self) -> Iterator[Batch]:
        """Yields a batch of each part. If batches have rows, halves are taken from the first batch."""
        batches = self._loader.batches([[self._samples[place] for place in part] for part in self._parts])
        if self._given is not None:
            batches = iter([tree_map(lambda leaf: leaf[: len(self._samples)], self._given)] * self._wholes)
        for _ in range(self._wholes):
            whole = next(batches)
            self.digests.add(digest(whole))
            yield tree_map_only(Tensor, torch.clone, whole)  # a model may write to it
        leaves, size = tree_leaves(whole), len(self._parts[0])
        if (self._loader.regroups and self._given is None) or not all(
            isinstance(leaf, Tensor) and list(leaf.shape[:1]) == [size] for leaf in leaves
        ):
            yield from batches
        else:
            for part in self._parts[self._wholes :]:
                yield tree_map(lambda leaf, rows=part: leaf[rows], whole)


@contextmanager
def training_mode(models: list[nn.Module], watch: WeightWatch) -> Iterator[None]:
    """Sets ``models`` to training mode whenever they are called inside the context, unless they write to weights then."""

    def train(model: nn.Module, _: Any) -> None:
        with watch.aside():  # loralib, for example, merges weights in eval() and separates them here
            model.train()

    hooks = [model.register_forward_pre_hook(train, prepend=True) for model in models if not watch.has_writes]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _has_user_loss(engine: Engine) -> bool:
    """Returns True for a user's loss if ranks do not split micro-batches (in a pipeline only one rank would see the
    loss). The built-in tasks return means."""
    module = type(engine.plan.task).__module__
    batch = engine.plan.batch
    users = not module.startswith("dsframe.") or module == Task.__module__  # Task.from_module
    return users and batch.data_parallel_size == engine.plan.world.size


def _shape_of_row(shape: torch.Size, rows: int) -> torch.Size:
    """Returns the shape without the dimension of rows, the first or the second; [] if neither is, as for nodes of graphs."""
    if shape[:1] == (rows,):
        return shape[1:]
    return shape[:1] + shape[2:] if shape[1:2] == (rows,) else shape[:0]


def _tolerance(engine: Engine) -> float:
    plan = engine.plan
    short = plan.task.context.dtype.itemsize < 4 or precision.autocast_dtype(plan.config, plan.device)
    return halves.TOLERANCE_OF_16_BITS if short else _TOLERANCE


def _kind_of_losses(engine: Engine, losses: Losses, *, wholes: int) -> str:
    """Returns the kind, from the losses of all samples (the first ``wholes`` entries) and of their halves."""
    kinds = set()
    for values in losses.of.values():
        pairs = ((0, at, at + 1) for at in range(wholes, len(values), 2))
        of = [([values[n] for n in three], [losses.items[n] for n in three]) for three in pairs]
        kinds.add(halves.agreed({halves.kind_of_parts(*parts, _tolerance(engine)) for parts in of}))
    return next((kind for kind in ("sum", "neither", "mean") if kind in kinds), "")


class Losses:
    """The losses of some batches in evaluation, by name ("" for a single model), and the number of items of each."""

    def __init__(self, engine: Engine, *, of_halves: bool = False) -> None:
        """``of_halves``: determine ``kind``."""
        self._engine, self._task, self._of_halves = engine, engine.plan.task, of_halves
        self.kind = ""
        """The kind of the first batch's loss, from halves of the same outputs."""
        watch = engine.built.watch
        self._differentiates = watch is not None and bool(
            derivatives.line_of(self._task, watch.model)
            or (engine.built.calls is None and _line_of_asking(engine))  # else shards wait for a backward pass
        )
        self.of: dict[str, list[float]] = {}
        self.items: list[float] = []

    def add(self, batch: tuple[Any, Any], *, samples: int) -> None:
        """**Collective.** Adds the losses of ``batch``, which has ``samples`` samples. Does not change the task."""
        engine, task = self._engine, self._task
        of_several = engine.built.losses
        weighted = gives(task, "loss_weight")
        self.items.append(float(task.loss_weight(batch[1])) if weighted else samples)
        asked, task.eval_gradients = task.eval_gradients, task.eval_gradients or self._differentiates
        try:
            if of_several is None:
                engine.eval_step(batch, self._measure)
                return
            state = vars(restore.twin(task))
            for name, loss in of_several(*batch).items():
                self.of.setdefault(name, []).append(float(loss))
            vars(task).update(state)
        finally:
            task.eval_gradients = asked

    def _measure(self, outputs: Any, targets: Any) -> Sums:
        held, copied, watch = restore.HeldBuffers(self._engine), restore.twin(self._task), self._engine.built.watch
        with watch.inside() if watch else nullcontext():
            self.of.setdefault("", []).append(float(loss_and_terms(copied.loss(outputs, targets))[0]))
            if self._of_halves:
                self._of_halves = False
                with suppress(Exception):  # as a loss for batches of one size
                    self.kind = halves.kind_of(copied, outputs, targets)
        held.put_back()
        return {}

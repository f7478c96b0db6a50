"""Evaluates one model on all validation samples, with any engine and any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dsframe.cluster.exchange import all_gather_json, by_value, failures
from dsframe.data import EvaluationLoader
from dsframe.data.loader import EvaluationBatch
from dsframe.data.sample_draws import RowDraws
from dsframe.engine import Engine
from dsframe.errors import DsframeError, EngineError, TaskError
from dsframe.host import generators
from dsframe.model import metric_objects
from dsframe.model.forward import elsewhere
from dsframe.model.metric_objects import FailedMetricError
from dsframe.model.micro_batch import Measure
from dsframe.model.persistent import put
from dsframe.model.plan import Plan
from dsframe.tasks.task import Sum, Sums, Task, gives, sums
from dsframe.text import Say, reason
from dsframe.training import loss_kind, restore, user_values, whole_set
from dsframe.training.finite import IF_NO_ITEMS
from dsframe.training.shared_buffers import but_statistics, take_over
from dsframe.values import tensors_of

Take = Callable[[EvaluationBatch, Any, Any], Sums]
"""Called with a batch that counts, the outputs and the targets."""

_LEFT_OUT = ""
"""Name of the number of batches that lack rows, of those that have another number of rows than samples."""


class Evaluation:
    """Computes the task's metrics for an engine's model."""

    def __init__(
        self,
        engine: Engine,
        loaders: Mapping[str, EvaluationLoader],
        sign_of_life: Callable[[], None],
        say: Say,
        on_batch: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """``loaders``: by set name, "" for a single set. ``sign_of_life``: called before each batch. ``say``: prints on
        rank 0 only. ``on_batch``: called with outputs and targets of each batch of this rank."""
        self._engine, self._loaders, self._sign_of_life, self._say = engine, loaders, sign_of_life, say
        self._on_batch = on_batch
        self._reported: set[str] = set()
        self._has_loss = gives(engine.plan.task, "loss")
        self._loss_error = ""
        """Why this rank could not compute the loss."""
        self._packed_batches: list[bytes] = []
        """The packed ``keep()`` value of each batch, for ``metrics_of_all``."""
        self._has_metrics_of_all = gives(engine.plan.task, "metrics_of_all")
        self._tests_batch_size: bool | None = True
        """True if the next batch tests whether metrics depend on the batch size; None: they do."""
        self._before: Task | None = None
        """The task from before a set, to detect a ``finalize`` that depends on this rank's batches."""
        self._calls_collectively: bool | None = None if engine.built.watch else False
        """True if loss or metrics call the model or communicate, which all ranks do together; None: not known yet."""
        plan = engine.plan
        self._compiled = bool(plan.config.settings.model.compile)
        whole = plan.batch.data_parallel_size == plan.world.size and not self._compiled
        self._draws = RowDraws(plan.seed, plan.device) if whole else None
        """Assigns random numbers to samples. None if that is impossible, or if the first batch drew none."""

    @property
    def batches(self) -> int:
        """Number of batches of each rank."""
        return sum(map(len, self._loaders.values()))

    def run(self, stops: Callable[[int], bool] = lambda batches: False) -> dict[str, float] | None:
        """**Collective.** Returns metrics over all validation samples, the same on every rank; None if ranks agree to
        stop early. ``stops``: called with the number of batches done. Restores random generators, so that a run resumed
        from a checkpoint before the evaluation continues identically."""
        plan = self._engine.plan
        average = plan.config.settings.ema
        kept = generators.capture(plan.device)
        with self._engine.averaged() if average and average.evaluate else nullcontext(), self._equal_buffers():
            results = self._evaluate_sets(stops)
        self._check_draws(kept)
        generators.restore(kept, plan.device)
        return results

    def _evaluate_sets(self, stops: Callable[[int], bool]) -> dict[str, float] | None:
        results: dict[str, float] = {}
        done = 0
        for name, loader in self._loaders.items():
            set_totals = self._evaluate_set(
                name, loader, self._measure_and_show, partial(lambda done, batches: stops(done + batches), done)
            )
            if set_totals is None:
                return None
            results |= self._results(name, set_totals)
            done += len(loader)
        return results

    def try_out(self) -> None:
        """**Collective.** Evaluates the first batch of each set, and the last if incomplete, before training, to find
        errors early. Raises TaskError, also if the file refers to a missing metric. Restores random generators. Runs
        uncompiled, because the compiler would treat training batches as another size of the same graph."""
        kept = generators.capture(self._engine.plan.device)
        watch = self._engine.built.watch
        moved = user_values.attributes(watch.model if watch else nn.Module())
        metrics: dict[str, float] = {}
        complete = True
        with (
            torch.compiler.set_stance("force_eager") if self._compiled else nullcontext(),
            watch.trial() if watch else nullcontext(),
            restore.task_unmoved(self._engine),
            self._equal_buffers(),
        ):
            for name, loader in self._loaders.items():
                batches = list(loader.trial())
                set_totals = self._evaluate_set(name, batches, self._measure)
                try:
                    metrics |= self._results(name, set_totals or {})
                except (ArithmeticError, ValueError):  # a few samples may leave nothing to divide by
                    complete = False
                except Exception as error:  # a few samples may lack a class
                    refused = isinstance(error, DsframeError) and not isinstance(error, FailedMetricError)
                    if refused or len(batches) == len(loader):
                        raise
                    complete = False
            self._check_draws(kept)
        if complete:
            refuse_unknown(self._engine.plan, metrics)
        moved.put_back()

    def each(self, name: str, take: Take) -> None:
        """**Collective.** Calls ``take`` instead of metrics, for each batch of a set that counts."""
        with self._equal_buffers():
            self._batches(name, self._loaders[name], take)

    def _evaluate_set(
        self,
        name: str,
        batches: Collection[EvaluationBatch] | EvaluationLoader,
        measure: Take,
        stops: Callable[[int], bool] = lambda batches: False,
    ) -> dict[str, Sum] | None:
        """**Collective.** Returns the sums over ``batches``, as many on each rank; None if ranks agree to stop."""
        metric_objects.reset(self._engine)
        self._packed_batches.clear()
        self._tests_batch_size = self._tests_batch_size is not None
        task, context = self._engine.plan.task, self._engine.plan.task.context
        context.local_rows = False
        if gives(task, "finalize") and self._engine.plan.world.size > 1:
            self._before = restore.twin(task)
        local_totals = self._batches(name, batches, measure, stops, self._call_for_other_ranks)
        if local_totals is None:
            return None
        if self._has_loss and (why := failures(self._engine, self._loss_error)):
            self._has_loss = False
            self._report_once(f"note: evaluations are without the loss, which fails in evaluation mode: {why[0]}")
            local_totals.pop("loss", None)
        if context.local_rows:
            self._report_once(
                "note: all_rows() has the rows of one batch in an evaluation, whose metrics depend on eval_micro_batch_size and, "
                "where the file leaves that out, on the number of processes; keep() and metrics_of_all() see all rows"
            )
        every = totals(self._engine, local_totals)
        uneven = every.pop(_LEFT_OUT, None)
        if uneven and uneven.total == uneven.count:  # none has more rows, as batches of items have
            self._report_once(
                "note: batches of an evaluation have fewer rows than samples: what collate leaves out is in no metric; return a "
                "row for each sample, or leave such samples out of eval_data"
            )
        if not gives(task, "loss_weight") and "loss" in every and every["loss"].total.isnan():
            self._report_once(f"note: the loss of an evaluation is NaN; {IF_NO_ITEMS}")
        return every

    def _batches(
        self,
        name: str,
        batches: Collection[EvaluationBatch] | EvaluationLoader,
        take: Take,
        stops: Callable[[int], bool] = lambda batches: False,
        join: Measure | None = None,
    ) -> dict[str, Sum] | None:
        """``join``: called with the outputs and targets of batches that do not count on this rank."""
        engine, number = self._engine, list(self._loaders).index(name)
        context = engine.plan.task.context
        context.eval_set = name
        total: dict[str, Sum] = {}
        with engine.evaluating(), context.evaluation():
            for done, batch in enumerate(batches):
                if done and stops(done):
                    return None
                self._sign_of_life()
                with (
                    self._draws.of(number, batch.samples) if self._draws else nullcontext(),
                    self._compile_stance(name, batch),
                ):
                    measured = engine.eval_step(batch.batch, partial(take, batch) if batch.counts else join)
                if self._draws and not (self._draws.drawn or self._draws.left_out):
                    self._draws = None
                for metric, value in measured.items() if batch.counts else ():
                    total[metric] = total[metric] + value if metric in total else value
        return total

    def _compile_stance(self, name: str, batch: EvaluationBatch) -> AbstractContextManager[Any]:
        """For a shorter batch a compiler would build another graph, and then treat training batches as dynamic."""
        short = len(batch.samples) < self._loaders[name].micro_batch_size
        return torch.compiler.set_stance("force_eager") if self._compiled and short else nullcontext()

    def _measure(self, batch: EvaluationBatch, outputs: Any, targets: Any) -> Sums:
        task, watch = self._engine.plan.task, self._engine.built.watch
        task.context.eval_samples = len(batch.samples)
        with nullcontext() if watch is None else watch.inside(), self._detect_collectives(), elsewhere(watch):
            for metric in task.metric_objects.values():
                task.update_metric(metric, outputs, targets)
            metrics = self._metrics(outputs, targets)
            if self._has_metrics_of_all:
                self._packed_batches.append(whole_set.packed(task.keep(outputs, targets)))
        if self._tests_batch_size:
            self._tests_batch_size = False
            self._test_batch_size(outputs, targets)
        return {name: _counted(metric) for name, metric in metrics.items()}

    def _test_batch_size(self, outputs: Any, targets: Any) -> None:
        """Reports once which metrics depend on the size of a batch."""
        task, drawn = self._engine.plan.task, self._draws and (self._draws.drawn or self._draws.left_out)
        if (
            drawn
            or self._calls_collectively is not False
            or task.context.local_rows
            or not self._engine.plan.world.is_main
        ):
            return
        no_loss, names = self._loss_error, loss_kind.unequal_metrics(self._engine, self._metrics, outputs, targets)
        self._loss_error = no_loss  # the test above may have set it
        if named := ", ".join(name for name in names if name != "loss" or not task.batch_dependent):
            self._tests_batch_size = None
            self._report_once(
                f"note: {named} of an evaluation depends on eval_micro_batch_size and the number of processes: return the sum over "
                "rows and their number (for a loss, loss_weight), or compute it in metrics_of_all() of what keep() returns"
            )

    def _metrics(self, outputs: Any, targets: Any) -> Sums:
        task = self._engine.plan.task
        metrics = sums(task.metrics(outputs, targets), f"{type(task).__name__}.metrics")
        return metrics if "loss" in metrics else {**self._loss(outputs, targets), **metrics}

    def _measure_and_show(self, batch: EvaluationBatch, outputs: Any, targets: Any) -> Sums:
        metrics = self._measure(batch, outputs, targets)
        if self._on_batch:
            self._on_batch(outputs, targets)
        rows, samples = _rows_of(batch), len(batch.samples)
        return metrics if rows == samples else {**metrics, _LEFT_OUT: Sum(torch.tensor(float(rows < samples)), 1)}

    @contextmanager
    def _detect_collectives(self) -> Iterator[None]:
        """Detects whether code inside calls a module of the model, or communicates."""
        watch = self._engine.built.watch
        if watch is None or self._calls_collectively:
            yield
            return
        called: list[nn.Module] = []
        hook = register_module_forward_pre_hook(lambda module, _: called.append(module))
        before = _collectives()
        try:
            yield
        finally:
            hook.remove()
            self._calls_collectively = _collectives() != before or not set(watch.model.modules()).isdisjoint(called)

    def _call_for_other_ranks(self, outputs: Any, targets: Any) -> Sums:
        """Makes the calls that other ranks make together, with rows that belong to another rank. Returns nothing."""
        if self._calls_collectively is not False:
            engine, task = self._engine, self._engine.plan.task
            with restore.task_unmoved(engine):
                try:
                    for metric in task.metric_objects.values():
                        task.update_metric(copy.deepcopy(metric), outputs, targets)
                    if "loss" not in task.metrics(outputs, targets):
                        task.validation_loss(outputs, targets)
                    if self._has_metrics_of_all:
                        task.keep(outputs, targets)
                except EngineError:
                    raise
                except Exception:  # reported by the rank that has these rows
                    pass
        return {}

    def _loss(self, outputs: Any, targets: Any) -> Sums:
        """Returns the loss, or {} if it fails: in evaluation mode some models, such as detectors, have other
        outputs."""
        task = self._engine.plan.task
        if self._loss_error or not self._has_loss:
            return {}
        try:
            return sums(task.validation_loss(outputs, targets), f"{type(task).__name__}.loss")
        except EngineError:  # from the weight watch
            raise
        except Exception as error:
            self._loss_error = reason(error, 200)
            return {}

    def _results(self, name: str, totals_by_name: Sums) -> dict[str, float]:
        """**Collective.** Returns the results of ``finalize``, of the metric objects and of ``metrics_of_all``."""
        engine = self._engine
        with elsewhere(engine.built.watch):
            computed = metric_objects.compute(engine)
            if self._has_metrics_of_all:
                computed |= whole_set.compute(engine, self._packed_batches)
                self._packed_batches.clear()
            finished = _finalized_alike(engine, totals_by_name, self._before)
        loss = {"loss": totals_by_name["loss"].mean} if "loss" in totals_by_name and "loss" not in finished else {}
        prefix = f"{name}/" if name else ""
        return {f"{prefix}{metric}": value for metric, value in {**loss, **finished, **computed}.items()}

    def _check_draws(self, before: Any) -> None:
        """**Collective.** Reports once if random numbers were drawn that belong to no sample."""
        engine = self._engine
        left_out = self._draws is not None and self._draws.left_out
        moved = generators.capture(engine.plan.device) != before
        drawn = torch.tensor([float(left_out or moved)], dtype=torch.float64, device=engine.plan.device)
        if engine.sum_over_ranks(drawn).item():
            self._report_once(
                "note: this evaluation draws random numbers that belong to no sample, different ones on each rank, so its "
                "metrics depend on the number of processes"
            )

    def _report_once(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            self._say(line)

    @contextmanager
    @torch.no_grad()
    def _equal_buffers(self) -> Iterator[None]:
        """**Collective.** Gives every rank the buffers of the first rank that holds them, and restores its own
        afterwards. BatchNorm's statistics depend on a rank's samples; without this no rank would evaluate the exported
        model, rank 0's."""
        kept = {name: buffer.to("cpu", copy=True) for name, buffer in self._engine.buffers().items()}
        differ = take_over(self._engine, kept)
        if stateful := but_statistics(self._engine, differ):
            self._report_once(
                f"warning: buffer {stateful} differs between ranks; results may depend on the number of ranks"
            )
        try:
            yield
        finally:
            for name, buffer in self._engine.buffers().items():
                if name in kept and not torch.equal(buffer.cpu(), kept[name]):
                    put(kept[name], buffer)


def _collectives() -> int:
    """Counts the all-rank collectives of this process that torch knows of."""
    everybody: Any = dist.group.WORLD
    return 0 if everybody is None else everybody._get_sequence_number_for_group()


def _rows_of(batch: EvaluationBatch) -> int:
    """Returns the number of rows that all tensors of a batch have; that of its samples if some have another, if it is
    their second dimension, or if one row may be all of them, joined."""
    shapes, samples = [leaf.shape for leaf in tensors_of(batch.batch) if not leaf.is_nested], len(batch.samples)
    sizes = {shape[0] for shape in shapes if shape}
    return samples if len(sizes) != 1 or sizes == {1} or any(samples in shape for shape in shapes) else sizes.pop()


def refuse_unknown(plan: Plan, metrics: Collection[str]) -> None:
    """Raises TaskError if the file refers to a metric that no evaluation reports."""
    best = plan.config.settings.checkpoints.keep_best
    wanted = {"dsframe.checkpoints.keep_best": best.partition(":")[0]} if best else {}
    wanted |= {follower.key: follower.metric for follower in plan.followers.values()}
    for key, metric in wanted.items():
        if metric not in metrics:
            raise TaskError(f"{key}: no metric {metric!r} in the evaluation; it has {', '.join(metrics) or 'none'}")


def _counted(metric: Sum) -> Sum:
    """Detaches the sum; its total is 0, not NaN, if the count is 0."""
    total = metric.total.detach()
    if isinstance(metric.count, Tensor):
        return Sum(total.where(metric.count.to(total.device) != 0, 0.0), metric.count)
    return Sum(total if metric.count else torch.zeros_like(total), metric.count)


def totals(engine: Engine, sums: Sums) -> dict[str, Sum]:
    """**Collective.** Returns sums over all ranks, float64 on the CPU. A rank without a metric contributes zeros."""
    names = sorted({name for names in all_gather_json(engine, sorted(sums)) for name in names})
    table = torch.zeros(len(names), 2, dtype=torch.float64, device=engine.plan.device)
    for row, name in enumerate(names):
        if name in sums:
            table[row, 0], table[row, 1] = sums[name].total.double(), float(sums[name].count)
    total = engine.sum_over_ranks(table.reshape(-1)).reshape(len(names), 2).cpu()
    return {name: Sum(*total[row]) for row, name in enumerate(names)}


def _finalized_alike(engine: Engine, sums: Sums, before: Task | None) -> dict[str, float]:
    """**Collective.** Returns the result of :func:`finalized`. Raises TaskError if values differ between ranks, or with
    the task's attributes from ``before`` the evaluation: they then depend on this rank's batches."""
    task, finished = engine.plan.task, dict[str, float]()
    modules = user_values.modules_of(task) if before else nn.Module()
    metrics = user_values.attributes(modules)  # torchmetrics gather the state of all ranks
    try:
        finished = finalized(task, sums)
    finally:  # other ranks wait for these values
        after = user_values.attributes(modules)
        metrics.put_back()
        report = [finished, _changed_by_batches(finished, before, sums) if before else []]
        after.put_back()
        of_ranks = all_gather_json(engine, report)
        changed = {name for _, names in of_ranks for name in names}
        for name in sorted({name for metrics, _ in of_ranks for name in metrics}):
            values = [f"{metrics.get(name)}" for metrics, _ in of_ranks]  # as text, because NaN != NaN
            if len(set(values)) > 1 or name in changed:
                raise TaskError(
                    f"{type(task).__name__}.finalize: {name!r} does not follow from the sums over all samples "
                    f"({by_value(values)}): it draws, or reads what this rank's batches have left. Take it "
                    "from sums, or compute it in metrics_of_all() of what keep() returns"
                )
    return finished


def _changed_by_batches(finished: Mapping[str, float], before: Task, sums: Sums) -> list[str]:
    """Returns the names of the values that change if the task has the attributes of ``before``."""
    try:
        alone = finalized(before, sums)
    except ArithmeticError:  # a count of 0
        return list(finished)
    except Exception:  # it needs attributes that the batches set
        return []
    return [name for name, value in finished.items() if f"{alone.get(name)}" != f"{value}"]


def finalized(task: Task, sums: Sums) -> dict[str, float]:
    """Returns the result of ``task.finalize``. Raises TaskError if that is not a mapping from names to numbers."""
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

"""The contract of ``dsframe.engine.Engine`` as plain functions: each takes a ready engine and raises where it is not kept.

``python -m tests.contract FILE ENGINE ...`` runs all of them in this process, as one rank of whatever launched it, on one file
after another; the tests of ``tests/engines/test_contract.py`` launch it under every engine. Every function is collective, as the
engine's methods are.
"""

import sys
from unittest import mock

import torch
from torch import nn

from dsframe import engines, tasks
from dsframe.cluster import world
from dsframe.cluster.process_group import device_of
from dsframe.config import Facts, load
from dsframe.data import EvaluationLoader, TensorSource
from dsframe.engine import StepResult
from dsframe.engines import base
from dsframe.model import optimizers, schedules
from dsframe.model.micro_batch import MicroBatch
from dsframe.model.plan import Plan
from dsframe.tasks import Sum, Task
from dsframe.tasks.task import accuracy
from dsframe.train import leave_at_once
from dsframe.training.evaluation import Evaluation
from tests.communication import Communication, Traffic

SAMPLES = 37
"""Prime, so that no world size and no batch size divides it."""


class Shift(nn.Module):
    """A buffer, which a rank may have changed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.full((2,), 0.5))

    def forward(self, points):
        return points + self.shift.to(points.dtype)


class Blobs(Task):
    """Three blobs in the plane, an MLP, and labels that need it."""

    partition_config = {  # noqa: RUF012
        "layer_specs": [
            {"patterns": [r"1\.weight$"], "partition_type": "column"},
            {"patterns": [r"3\.weight$"], "partition_type": "row"},
        ]
    }

    def model(self):
        return nn.Sequential(Shift(), nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))

    def loss(self, outputs, targets):
        assert outputs.dtype == torch.float32, "losses are computed in fp32 on every engine"
        return nn.functional.cross_entropy(outputs, targets)

    def metrics(self, outputs, targets):
        rows = Sum(torch.ones(()) * len(targets), 1)
        loss = Sum(self.loss(outputs, targets) * len(targets), len(targets))
        return {
            "loss": loss,
            "accuracy": accuracy(outputs, targets),
            "rows": rows,
            "seen": Sum(targets.double().sum(), 1),
        }

    def train_data(self):
        draw = torch.Generator().manual_seed(1)
        targets = torch.randint(3, (SAMPLES,), generator=draw)
        return TensorSource(torch.randn(SAMPLES, 2, generator=draw) + targets[:, None].float(), targets)


def sentences(config):
    """The file's own language model, as small as it is; of ranks that share sequences each counts its slice of the rows."""
    task = tasks.build(config.settings.task, config.settings.seed)

    def metrics(outputs, targets):
        rows = targets.numel() / config.settings.task.context
        loss = task.loss(outputs, targets)
        return {"loss": Sum(loss * rows, rows), "rows": Sum(rows, 1), "seen": Sum(targets.double().sum(), 1)}

    task.metrics = metrics
    return task


def micro_batches(engine, step):
    """This rank's share of a global batch that is the same whatever the number of ranks."""
    plan, source = engine.plan, engine.plan.task.train_data()
    batch = plan.batch
    for micro in range(batch.accumulation_steps):
        first = (
            step * batch.train_batch_size
            + (micro * engine.plan.batch.data_parallel_size + engine.plan.data_rank) * batch.micro_batch_size
        )
        yield source.batch(torch.arange(first, first + batch.micro_batch_size) % SAMPLES, 0)


def held_out(engine, size):
    """This rank's batches of an evaluation."""
    plan = engine.plan
    ranks = plan.batch.data_parallel_size
    return EvaluationLoader(plan.task.train_data(), seed=0, micro_batch_size=size, rank=plan.data_rank, ranks=ranks)


def check_a_step_is_an_update(engine):
    """The result's parts are what they say, and training on one batch lowers its loss."""
    first = engine.train_step(MicroBatch.of(micro_batches(engine, 0)))
    assert isinstance(first, StepResult)
    assert first.loss.ndim == 0
    assert first.loss.dtype == torch.float32
    assert not first.loss.requires_grad
    assert first.learning_rate == 0.01
    assert not first.skipped
    # Ranks that average weights have no gradient in common.
    assert (first.gradient_norm is not None) == getattr(engine, "averages_gradients", True)
    assert first.gradient_norm is None or float(first.gradient_norm) > 0
    for _ in range(20):
        last = engine.train_step(MicroBatch.of(micro_batches(engine, 0)))
    assert float(last.loss) < float(first.loss)


def check_it_takes_exactly_its_micro_batches(engine):
    """An engine that read one more would train on the next step's samples."""
    taken = 0

    def counted():
        nonlocal taken
        for batch in micro_batches(engine, 0):
            taken += 1
            yield batch

    engine.train_step(MicroBatch.of(counted()))
    assert taken == engine.plan.batch.accumulation_steps


def check_sums_run_over_all_ranks(engine):
    """Whatever the shape, and without touching the argument."""
    rank, size = engine.plan.world.rank, engine.plan.world.size
    values = torch.tensor([1.0, float(rank), 1e-12], dtype=torch.float64)
    total = engine.sum_over_ranks(values)
    assert total.tolist() == [size, size * (size - 1) / 2, size * 1e-12]
    assert values.tolist() == [1.0, float(rank), 1e-12]


def check_evaluation_counts_every_sample_once(engine):
    """Also the last, incomplete batch, and also where this rank has none of it."""
    source = engine.plan.task.train_data()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch, _, counts in held_out(engine, 8):
        found = engine.eval_step(batch, engine.plan.task.metrics if counts else None)
        assert not found or counts  # of ranks that split one model, one has the metrics: the sums below say so
        if found:
            sums += torch.tensor([float(found["rows"].total), float(found["seen"].total)], dtype=torch.float64)
    rows, seen = engine.sum_over_ranks(sums).tolist()
    assert (rows, seen) == (SAMPLES, float(source.batch(torch.arange(SAMPLES), 0)[1].sum()))


def check_evaluation_leaves_no_trace(engine):
    """The next step is the same with and without: its loss is the one an evaluation of the same rows gives."""
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in micro_batches(engine, 5):
        found = engine.eval_step(batch, engine.plan.task.metrics)
        if found:
            sums += torch.tensor([float(found["loss"].total), float(found["loss"].count)], dtype=torch.float64)
    assert not engine.built.watch or engine.built.watch.model.training
    result = engine.train_step(MicroBatch.of(micro_batches(engine, 5)))
    total, rows = engine.sum_over_ranks(sums).tolist()
    losses = engine.sum_over_ranks(result.loss.double().reshape(1))
    assert rows == engine.plan.batch.train_batch_size
    assert abs(float(losses) / engine.plan.world.size - total / rows) < 1e-5
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def check_evaluation_is_of_one_model(engine):
    """Whatever ranks have made of their buffers, and each has its own again afterwards."""
    said = []
    evaluation = Evaluation(engine, {"": held_out(engine, 8)}, lambda: None, said.append)
    before = evaluation.run()
    assert not engine.built.watch or engine.built.watch.model.training
    assert not any(line.startswith("warning") for line in said)  # totals depend on the batches: a note says so
    said.clear()
    for buffer in engine.buffers().values():
        buffer += engine.plan.world.rank
    changed = {name: buffer.clone() for name, buffer in engine.buffers().items()}
    assert evaluation.run() == evaluation.run() == before
    holders = engine.sum_over_ranks(torch.tensor([float("0.shift" in changed)], dtype=torch.float64))
    assert [line.partition(" differs")[0] for line in said] == ["warning: buffer 0.shift"] * (float(holders) > 1)
    for name, buffer in engine.buffers().items():
        assert torch.equal(buffer, changed[name])
        buffer -= engine.plan.world.rank


def check_weights_that_stay_gathered_change_nothing(engine):
    """An evaluation of several batches, and the step after it, is the same whether weights are gathered once or once a batch."""
    evaluation = Evaluation(engine, {"": held_out(engine, 2)}, lambda: None, lambda line: None)
    with Communication() as once:
        found = evaluation.run()
    with mock.patch.object(base, "available_bytes", return_value=0), Communication() as each_time:
        assert evaluation.run() == found
    loss = engine.train_step(MicroBatch.of(micro_batches(engine, 6))).loss
    if engine.plan.world.is_main:
        kept, anew = (sent.by_kind.get("all-gather", Traffic()).payload_bytes for sent in (once, each_time))
        print(f"gathered in an evaluation: {kept} bytes, {anew} where nothing stays")
    assert torch.isfinite(loss)


CHECKS = (
    check_a_step_is_an_update,
    check_it_takes_exactly_its_micro_batches,
    check_sums_run_over_all_ranks,
    check_evaluation_counts_every_sample_once,
    check_evaluation_leaves_no_trace,
    check_evaluation_is_of_one_model,
    check_weights_that_stay_gathered_change_nothing,
)


def make(file, name):
    """**Collective.** An engine of this name on Blobs, or on the file's own language model."""
    config, here = load(file), world.here()
    own = "task" in config.settings.model_fields_set
    task, optimizer = sentences(config) if own else Blobs(), optimizers.read(config)
    schedule = schedules.constant(optimizer.learning_rate)
    config = config.resolve(Facts(here.size, replicas=engines.TABLE[name].replicas))
    plan = Plan(config, here, task, optimizer, schedule, config.batch(here.size), device_of(here))
    return engines.load(name, config)(plan)


if __name__ == "__main__":
    for file, name in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        made = make(file, name)
        for check in CHECKS:
            check(made)
        speaks = made.plan.world.is_main
        made.close()
        if speaks:
            print(f"kept: {len(CHECKS)} rules by {made.description}")
    leave_at_once(0)

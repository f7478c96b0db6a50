"""The evaluation before the first step, which training does not see; and whose buffers an evaluation takes."""

from __future__ import annotations

import os
from unittest.mock import MagicMock

import hypothesis
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate
from torchmetrics import MeanMetric

import dsframe
from dsframe.data import EvaluationLoader, TensorSource, as_source
from dsframe.errors import TaskError
from dsframe.model.micro_batch import MicroBatch
from dsframe.tasks.task import Sum, Task
from dsframe.training import whole_set
from dsframe.training.evaluation import Evaluation, _finalized_alike, finalized
from dsframe.training.shared_buffers import differing, take_over
from tests.files import ds_config
from tests.threads import Room
from tests.unit.test_step_path import make as engine_of


class Ready(nn.Module):
    """Takes its scale from the first batch it sees, in whatever mode."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("scale", torch.zeros(0))
        self.register_buffer("kept", torch.ones(2).expand(4, 2))

    def forward(self, rows):
        if not self.scale.numel():
            self.scale.resize_(3).copy_(rows.abs().amax(0) * torch.rand(3))
        return self.inner(rows / self.scale).squeeze(1)


class ReadyTask(dsframe.Task):
    def model(self):
        return Ready()

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self):
        return TensorSource(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), torch.ones(12))


def make(task=None, **settings):
    task = task or ReadyTask()
    engine = engine_of("single", task, 0.0, **settings)
    loader = EvaluationLoader(task.train_data(), seed=0, micro_batch_size=5)
    return engine, Evaluation(engine, {"": loader}, lambda: None, print)


def test_training_does_not_see_the_trial():
    losses = []
    for tried in (False, True):
        engine, evaluation = make()
        if tried:
            evaluation.try_out()
            assert engine.buffers()["scale"].shape == (0,)
        steps = [
            engine.train_step(MicroBatch.of([ReadyTask().train_data().batch(torch.arange(4), 0)])) for _ in range(3)
        ]
        losses.append([float(step.loss) for step in steps])
        assert set(evaluation.run()) == {"loss"}
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own compiler calls it
def test_the_trial_is_not_compiled():
    engine, evaluation = make(model={"compile": True})
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = engine.model
    model.forward = torch.compile(Ready.forward.__get__(model), backend=backend)
    evaluation.try_out()
    assert graphs == []
    evaluation.run()
    assert graphs


def rows_first(rows):
    values = torch.tensor([sum(row) for row in rows], dtype=torch.float64)
    return values, torch.zeros(len(rows))


def ragged(rows):
    return [torch.tensor(row, dtype=torch.float64) for row in rows], [{"boxes": torch.zeros(len(row))} for row in rows]


def items(rows):
    values = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    return values, torch.zeros(len(values))


class Summing(Task):
    """The loss is the mean over samples of each one's sum, or over items of each item, by the form of the batch."""

    def __init__(self, collate):
        self.collate = collate

    def loss(self, outputs, targets):
        if self.collate is items:
            return outputs.mean()
        total = sum(map(torch.sum, outputs)) if isinstance(outputs, list) else outputs.sum()
        return total / self.context.eval_samples


ROWS = hypothesis.strategies.lists(hypothesis.strategies.integers(-9, 9), min_size=0, max_size=5)


@pytest.mark.parametrize("collate", [rows_first, ragged, items])
@hypothesis.given(
    rows=hypothesis.strategies.lists(ROWS, min_size=1, max_size=40),
    ranks=hypothesis.strategies.integers(1, 3),
    size=hypothesis.strategies.integers(1, 9),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_every_sample_is_counted_once_whatever_a_batch_is(collate, rows, ranks, size):
    rows = rows if collate in (items, ragged) else [row or [0] for row in rows]
    engine = MagicMock()
    engine.plan.task, engine.plan.config.settings.model.compile, engine.built.watch = Summing(collate), False, None
    engine.eval_step = lambda batch, measure: measure(*batch) if measure else {}
    loaders = [
        EvaluationLoader(as_source(rows, 0, collate), seed=0, micro_batch_size=size, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    assert all(len(list(loader)) == len(loader) for loader in loaders)
    evaluation = Evaluation(engine, {"": loaders[0]}, lambda: None, print)
    total, seen = Sum(torch.tensor(0.0), 0), []
    for batches in zip(*loaders, strict=True):
        assert len({len(one.samples) for one in batches}) == 1, "ranks have equally long batches at a time"
        seen += [sample for one in batches if one.counts for sample in one.samples]
    for loader in loaders:
        total += (evaluation._batches("", loader, evaluation._measure) or {}).get("loss", Sum(torch.tensor(0.0), 0))
    assert seen == list(range(len(rows)))
    numbers = [value for row in rows for value in row] if collate is items else rows
    assert float(total.count) == len(numbers)
    assert float(total.total) == pytest.approx(sum(value for row in rows for value in row), abs=1e-9)


class Where(Dataset):
    """Who reads it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(1), os.getpid()


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_the_trials_batch_too(workers):
    """A data set opens its files when it is first read: opened here, all workers would share their position."""
    loader = EvaluationLoader(Where(), seed=0, micro_batch_size=3, workers=workers)
    (_, readers), samples, counts = next(loader.trial())
    assert (samples, counts) == (range(3), True)
    assert (set(readers.tolist()) == {os.getpid()}) == (workers == 0)


class Stateful(nn.Module):
    """A module with a number that is in no tensor."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def get_extra_state(self):
        return self.number

    def set_extra_state(self, state):
        self.number = state


def test_every_rank_evaluates_one_rank_s_buffers():
    """To the bit. A stage's layer is not on rank 0, and one more size is not exchanged; all that differs is named."""

    def evaluated(ranks):
        rank = ranks.plan.world.rank
        of_all = {
            "flags": torch.full((3,), rank, dtype=torch.uint8),
            "norm": torch.full((3,), 0.1 * (rank + 1)),
            "last": torch.tensor(rank // 2),
            "same": torch.ones(2),
        }
        held = of_all | {"sized": torch.ones(1 + rank)} | ({"layer": torch.full((2,), rank)} if rank else {})
        ranks.buffers, ranks.built = lambda: held, MagicMock()
        ranks.built.watch.model = Stateful(rank)
        differ = differing(ranks)
        taken = take_over(ranks, {name: buffer.clone() for name, buffer in held.items()})
        return differ, sorted(taken), {name: buffer.tolist() for name, buffer in held.items()}

    for rank, (differ, taken, held) in enumerate(Room(3).run(evaluated)):
        assert differ == ["_extra_state", "flags", "last", "layer", "norm", "sized"]
        assert taken == ["flags", "last", "layer", "norm"]
        norm = torch.full((3,), 0.1).tolist()
        shared = {"flags": [0, 0, 0], "norm": norm, "last": 0, "same": [1, 1]}
        assert held == shared | {"sized": [1] * (1 + rank)} | ({"layer": [1, 1]} if rank else {})


class GatheringTask(ReadyTask):
    def loss(self, outputs, targets):
        return super().loss(self.all_rows(outputs), targets)


@pytest.mark.parametrize(("task", "lines"), [(ReadyTask, 0), (GatheringTask, 1)])
def test_rows_of_one_batch_in_the_place_of_all_are_said(task, lines, capsys):
    """Once: the trial before training says it first."""
    _, evaluation = make(task())
    evaluation.try_out()
    evaluation.run()
    assert capsys.readouterr().out.count("note: all_rows() has the rows of one batch") == lines


@pytest.mark.parametrize(
    ("gives", "message"), [(3, "returned int; return numbers by name"), ({"f1": None}, "'f1' is NoneType")]
)
def test_a_finalize_that_gives_no_numbers(gives, message):
    task = Task()
    task.finalize = lambda sums: gives
    with pytest.raises(TaskError, match=rf"Task\.finalize.*{message}"):
        finalized(task, {})


class Random(ReadyTask):
    """Draws numbers that belong to no sample: their order is the batch's, or their generator the task's own."""

    draws = None

    def model(self):
        return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))

    def metrics(self, outputs, targets):
        self.draws(len(targets))
        return super().metrics(outputs, targets)


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("draws", "said"),
    [
        (lambda rows: torch.randn(rows, 2), False),
        (lambda rows: torch.randn(rows + 1), True),
        (torch.randperm, True),
        (lambda rows: torch.randn(rows, generator=torch.Generator().manual_seed(0)), True),
        (lambda rows: torch.randn(1, 3, generator=torch.Generator().manual_seed(0)), False),
        (lambda rows: torch.randn(1, 3, generator=GENERATOR), True),
    ],
)
def test_draws_that_belong_to_no_sample_are_said_once(draws, said, capsys):
    task = Random()
    task.draws = draws
    _, evaluation = make(task)
    evaluation.try_out()
    evaluation.run()
    evaluation.run()
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "draws random numbers that belong to no sample" in line
    ]
    assert len(lines) == said


class Heat(Task):
    """A differential equation: the metric is a derivative of the outputs by the inputs."""

    def model(self):
        class Net(torch.nn.Sequential):
            def forward(self, points):
                points.requires_grad_()
                return super().forward(points), points

        return Net(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(self, outputs, targets):
        values, points = outputs
        (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        return (slope - targets).square().mean()

    def train_data(self):
        points = torch.linspace(0, 1, 8).unsqueeze(1)
        return torch.utils.data.TensorDataset(points, points.cos())

    eval_data = train_data


def test_an_evaluation_takes_derivatives(here):
    task = Heat()
    task.eval_gradients = True
    summary = dsframe.fit(task, ds_config(4, "AdamW", 1e-3, engine="single", steps=1, run_dir="run"))
    torch.manual_seed(0)
    model = dsframe.load_model(here / "run", Heat())
    points, targets = Heat().train_data().tensors
    assert summary.metrics["loss"] == pytest.approx(float(task.loss(model(points), targets).detach()), abs=1e-6)


class Opaque:
    """An object that bytes of another rank must not build."""


@pytest.mark.parametrize("kept", [Opaque(), {"text": "a", "numbers": [1, 2.5], "boxes": (torch.ones(2, 4)[:1],)}])
def test_what_is_kept_is_of_tensors_numbers_and_texts(kept):
    task = Task()
    task.metrics_of_all = lambda batches: {"batches": len(batches)}
    answer = whole_set._computed(task, [whole_set.packed(kept)])
    if isinstance(kept, Opaque):
        assert "Task.keep returned objects of a class" in answer["error"]
    else:
        assert answer == {"metrics": {"batches": 1.0}}


def test_what_is_kept_of_a_large_tensor_is_small():
    assert len(whole_set.packed(torch.zeros(1000, 1000)[:1])) < 10_000


@pytest.mark.parametrize(
    ("metrics", "how"),
    [(lambda batches: 1 / 0, "undefined"), (lambda batches: [][0], "failed"), (lambda batches: {"a": "b"}, "refused")],
)
def test_only_what_a_task_computes_may_be_undefined(metrics, how):
    """A result that is no number is the task's mistake, whatever the samples are."""
    task = Task()
    task.metrics_of_all = metrics
    assert whole_set._computed(task, [])["how"] == how


def test_slices_of_sequences_are_not_the_whole_set():
    engine = MagicMock()
    engine.plan.batch.sequence_parallel_size = 2
    with pytest.raises(TaskError, match="a rank has slices of sequences"):
        whole_set.compute(engine, [])


def test_every_ranks_batches_come_to_rank_0():
    kept = [[b"a", b"bc", b"d"], [b"e"]]
    heard = Room(2).run(lambda ranks: whole_set.gathered(ranks, kept[ranks.plan.world.rank]))
    assert heard[0] == [b"a", b"e", b"bc", b"d"]


class Counts(ReadyTask):
    """Counts samples by itself, of which each of two ranks has as many."""

    def __init__(self, how):
        self.how, self.samples = how, 0

    def finalize(self, sums):
        right = sums["right"]
        count = {"own": self.samples, "sums": right.count}[self.how]
        return {"accuracy": float(right.total) / float(count)}


@pytest.mark.parametrize(("how", "refused"), [("own", True), ("sums", False)])
def test_a_number_of_this_ranks_samples_is_refused(how, refused):
    """Though it is the same on both ranks: 6 of 12 right are not 6 of 6."""

    def said(ranks):
        before, ranks.plan.task = Counts(how), Counts(how)
        ranks.plan.task.samples = 6
        try:
            return str(_finalized_alike(ranks, {"right": Sum(torch.tensor(6.0), 12)}, before)["accuracy"])
        except TaskError as error:
            return str(error)

    for line in Room(2).run(said):
        assert ("Counts.finalize: 'accuracy' does not follow from the sums over all samples" in line) == refused
        assert refused or line == "0.5"


class Picky(ReadyTask):
    """Has no loss of so many rows. The look at a batch's size takes 2 and 3 of 5, the last batch has 2 of 12."""

    model = Random.model

    def __init__(self, refused):
        self.refused = refused

    def metrics(self, outputs, targets):
        return {}

    def loss(self, outputs, targets):
        if len(targets) == self.refused:
            raise ValueError(self.refused)
        return super().loss(outputs, targets)


@pytest.mark.parametrize(("refused", "names"), [(3, {"loss"}), (2, set())])
def test_a_loss_is_of_all_batches_or_left_out(refused, names):
    _, evaluation = make(Picky(refused))
    assert evaluation.run().keys() == names


class Drawing(ReadyTask):
    """Draws a number for each row, and has a loss of its own for evaluations."""

    def metrics(self, outputs, targets):
        drawn = Sum(torch.rand(len(targets), 2).sum(), 1)
        return {f"of {self.context.eval_set}": drawn, "loss": Sum(torch.tensor(7.0), 1)}


def test_each_set_is_evaluated_by_itself():
    """Its numbers are its own; all of them are asked whether to stop, with the batches done, and are shown."""
    task, asked, seen = Drawing(), [], []
    loaders = {name: EvaluationLoader(task.train_data(), seed=0, micro_batch_size=5) for name in "ab"}
    evaluation = Evaluation(
        engine_of("single", task, 0.0), loaders, lambda: None, print, lambda *batch: seen.append(batch)
    )
    results = evaluation.run(lambda done: asked.append(done))
    assert (asked, len(seen)) == ([1, 2, 4, 5], 6)
    assert results.keys() == {"a/of a", "a/loss", "b/of b", "b/loss"}
    assert results["a/of a"] != results["b/of b"]
    assert results["a/loss"] == 7


class Classes(ReadyTask):
    """Metrics of the classes of a batch, and what all three of them come to. The trial sees the first and last of 12 samples."""

    def __init__(self, how, samples):
        self.how, self.samples = how, samples

    def train_data(self):
        return TensorSource(
            super().train_data().batch(torch.arange(self.samples), 0)[0], torch.arange(self.samples) // 5 * 1.0
        )

    def metrics(self, outputs, targets):
        return {f"class {target:.0f}": Sum((targets == target).sum(), 1) for target in targets.unique()}

    def metrics_of_all(self, batches):
        targets = torch.cat([targets for _, targets in batches]).tolist()
        counts = {target: targets.count(target) for target in targets}
        return {"all": sum(counts[target] for target in range(3))} if self.how == "metrics_of_all" else {}

    def finalize(self, sums):
        return {"sum": sum(sums[f"class {target}"].total for target in range(3))} if self.how == "finalize" else {}


@pytest.mark.parametrize(("how", "error"), [("finalize", KeyError), ("metrics_of_all", TaskError)])
def test_the_trial_may_be_without_a_class(how, error):
    _, evaluation = make(
        Classes(how, samples=12), checkpoints={"keep_best": "all:max" if how == "metrics_of_all" else "sum:max"}
    )
    evaluation.try_out()
    results = evaluation.run()
    assert results.get("all", 12) == 12
    assert results.keys() & {"sum", "all"}
    _, evaluation = make(Classes(how, samples=5))
    with pytest.raises(error):  # these are all samples, so that no evaluation can succeed
        evaluation.try_out()


class Judged(ReadyTask):
    """Outputs are numbers of rows, from 0 to 11."""

    calls = 0

    def __init__(self, metric):
        self.metric, self.mean = metric, MeanMetric()

    def model(self):
        return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))

    def train_data(self):
        return TensorSource(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), torch.arange(12.0))

    def metrics(self, outputs, targets):
        self.calls += 1
        self.mean.update(outputs)
        return {"metric": self.metric(targets)}


class Totals(Judged):
    def finalize(self, sums):
        return {"metric": float(sums["metric"].total)}


def mean_of_batch(targets):
    return Sum(targets.mean(), 1)


METRICS = {
    "a mean of a batch": (Judged(mean_of_batch), True),
    "a largest one": (Judged(lambda targets: Sum(targets.max() * len(targets), len(targets))), True),
    "a number of batches": (Totals(mean_of_batch), True),
    "a sum": (Judged(lambda targets: Sum(targets.sum(), len(targets))), False),
    "a sum over some": (Judged(lambda targets: Sum(targets[targets > 1].sum(), (targets > 1).sum())), False),
    "a total": (Totals(lambda targets: Sum(targets.sum(), 1)), False),
    "one row each": (Judged(lambda targets: Sum(targets.sum(), len(targets)) if len(targets) == 5 else 1 / 0), False),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_depends_on_the_size_of_a_batch_is_said_once(name, capsys):
    task, said = METRICS[name]
    _, evaluation = make(task)
    evaluation._tests_batch_size = True
    batch = next(iter(evaluation._loaders[""]))
    outputs, targets = torch.zeros(5), batch.batch[1]
    evaluation._calls_collectively = False
    for _ in range(2):
        evaluation._tests_batch_size = evaluation._tests_batch_size is not None
        evaluation._measure(batch, outputs, targets)
    assert capsys.readouterr().out.count("metric of an evaluation depends on eval_micro_batch_size") == said
    assert task.context.eval_samples == 5


def test_a_look_and_a_trial_leave_the_task_and_its_metrics_as_they_were():
    task = Judged(mean_of_batch)
    _, evaluation = make(task)
    evaluation.try_out()
    assert (task.calls, task.mean.update_count) == (0, 0)
    evaluation.run()
    assert (task.calls, task.mean.update_count) == (3, 3)


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_a_sum_over_nothing_adds_nothing(kind):
    def some(targets):
        chosen = targets[targets > 4]  # none of the first batch
        return Sum(chosen.mean() * len(chosen), kind(len(chosen)))

    _, evaluation = make(Judged(some))
    assert evaluation.run()["metric"] == 8.0


class Chosen(ReadyTask):
    """A mean over the rows below a number."""

    def loss(self, outputs, targets):
        return outputs.flatten()[targets < 5].mean()

    def train_data(self):
        return TensorSource(torch.randn(12, 3), torch.arange(12.0))


class Weighed(Chosen):
    def loss_weight(self, targets):
        return (targets < 5).sum()


@pytest.mark.parametrize("task", [Chosen, Weighed])
def test_a_loss_over_no_items_is_said_once(task, capsys):
    _, evaluation = make(task())
    results = [evaluation.run() for _ in range(2)]
    assert all((result["loss"] != result["loss"]) == (task is Chosen) for result in results)
    assert capsys.readouterr().out.count("return their number from loss_weight(targets)") == (task is Chosen)


class Collated(ReadyTask):
    """Rows with their numbers."""

    def __init__(self, collate):
        self.eval_collate = collate

    def model(self):
        return nn.PReLU()

    def loss(self, outputs, targets):
        return outputs.mean()

    def train_data(self):
        return [(torch.full((3,), float(number)), torch.tensor(float(number))) for number in range(14)]


def dropping(rows):
    return default_collate([row for row in rows if row[1] != 7])


def joined(rows):
    return default_collate(rows)[0].flatten()[None], torch.zeros(1)


def time_first(rows):
    return tuple(part[None].expand(2, *part.shape) for part in default_collate(rows))


def boxes(rows):
    """None of a batch's last row, one or three of the others, one after the other: 4 of 5 rows, then 12."""
    counts = torch.tensor([1 + 2 * (number > 4) for _, number in rows[1:]] + [0])
    return tuple(part.repeat_interleave(counts, 0) for part in default_collate(rows))


@pytest.mark.parametrize("collate", [dropping, joined, time_first, boxes, default_collate])
def test_samples_that_collate_leaves_out_are_said(collate, capsys):
    task = Collated(collate)
    engine = engine_of("single", task, 0.0)
    loader = EvaluationLoader(as_source(task.train_data(), 0, collate), seed=0, micro_batch_size=5)
    evaluation = Evaluation(engine, {"": loader}, lambda: None, print)
    for _ in range(2):
        assert [*evaluation.run()] == ["loss"]
    assert capsys.readouterr().out.count("fewer rows than samples") == (collate is dropping)


class Mode(ReadyTask):
    """Reports whether metrics find the model in training mode."""

    def model(self):
        self.net = super().model()
        return self.net

    def metrics(self, outputs, targets):
        return {"training": Sum(float(self.net.training) * len(targets), len(targets))}


def test_metrics_find_the_model_in_evaluation_mode():
    engine, evaluation = make(Mode())
    assert evaluation.run()["training"] == 0.0
    assert engine.model.training

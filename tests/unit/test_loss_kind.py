"""A loss that is a sum over rows trains as the sum over the global batch where the task says so, and is an error where not."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset, default_collate

import dsframe
from dsframe.data import Pad, TensorSource
from dsframe.errors import TaskError
from dsframe.training.halves import kind_of
from tests import lines
from tests.files import ds_config

pytestmark = pytest.mark.usefixtures("here")


class Line(lines.HeldOut):
    inputs, outputs, rows = 3, 4, 32

    def __init__(self, loss, **says):
        self._loss = loss
        for name, value in says.items():
            setattr(self, name, value)

    def loss(self, outputs, targets):
        return self._loss(outputs, targets)


def mean(outputs, targets):
    return functional.mse_loss(outputs, targets)


def total(outputs, targets):
    return functional.mse_loss(outputs, targets, reduction="sum")


def by_batch(outputs, targets):
    return torch.cdist(outputs, outputs).mean()


def largest(outputs, targets):
    """Over the worse half of the rows."""
    return (outputs - targets).square().mean(1).topk(max(1, len(targets) // 2))[0].mean()


def by_count(outputs, targets):
    """Weights of classes by how often they are there: over two rows it is the mean."""
    classes = targets.argmax(1)
    return functional.cross_entropy(outputs, classes, weight=1 / (1 + torch.bincount(classes, minlength=4).float()))


def drawing(outputs, targets):
    return mean(outputs + 3 * torch.randn_like(outputs), targets)


def mean_of_rows(outputs, targets):
    return (outputs - targets).square().mean(1)


def without_gradients(outputs, targets):
    with torch.no_grad():
        factor = mean(outputs, targets) / outputs.abs().mean()
    return mean(outputs, targets) + outputs.abs().mean() * factor


KINDS = {
    "mean": (mean, "mean"),
    "mean and a constant": (lambda o, t: mean(o, t) + 3, "mean"),
    "its own": (lambda o, t: o.mean() * 0 + 2.0, "mean"),
    "sum": (total, "sum"),
    "sum by a constant": (lambda o, t: total(o, t) / 8, "sum"),
    "batch": (by_batch, "neither"),
    "worse half": (largest, "neither"),
    "root": (lambda o, t: mean(o, t).sqrt(), "neither"),
    "sum and a constant": (lambda o, t: total(o, t) + 300, "neither"),
    "padding without loss_weight": (
        lambda o, t: functional.cross_entropy(o, t.argmax(1).masked_fill(t[:, 0] > 0, -100)),
        "neither",
    ),
    "zero": (lambda o, t: o.sum() * 0, ""),
    "balanced by values": (
        lambda o, t: mean(o, t) + o.abs().mean() * (mean(o, t) / o.abs().mean()).detach(),
        "neither",
    ),
    "weighted by values": (lambda o, t: (mean_of_rows(o, t) * mean_of_rows(o, t).detach()).mean(), "mean"),
    "its own scale": (lambda o, t: mean(o, t) / mean(o, t).item(), "neither"),
    "balanced by data": (lambda o, t: mean(o, t) + o.abs().mean() * (mean(o, t) / o.abs().mean()).data, "neither"),
    "balanced without gradients": (without_gradients, "neither"),
    "sum with gradients on": (lambda o, t: (total if torch.is_grad_enabled() else mean)(o, t), "sum"),
    "batch of outputs with gradients": (lambda o, t: (mean if o.grad_fn is None else by_batch)(o, t), "neither"),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_loss(name):
    numbers = torch.Generator().manual_seed(1)
    rows = [torch.randn(9, 4, generator=numbers) for _ in range(2)]
    rows[0].requires_grad_()
    loss, kind = KINDS[name]
    with torch.no_grad():  # as the engines call it
        assert kind_of(Line(loss), *rows).partition(",")[0] == kind  # "neither, by its gradients"
        assert kind_of(Line(loss), rows[0][:1], rows[1][:1]) == ""


def test_gradients_are_looked_at_though_some_outputs_have_none():
    def scaled(outputs, targets):
        loss = mean(outputs[0], targets)
        return loss / loss.item()

    assert kind_of(Line(scaled), (torch.randn(8, 4), torch.arange(8)), torch.randn(8, 4)).startswith("neither")


def file(accumulation, steps=6):
    return ds_config(
        8,
        "SGD",
        0.01,
        sections={"gradient_accumulation_steps": accumulation, "gradient_clipping": 0},
        engine="single",
        steps=steps,
        checkpoints={"at_end": False},
    )


def test_a_sum_that_nobody_named_is_an_error_where_it_matters(capsys):
    with pytest.raises(
        TaskError, match=r"Line\.loss gives a sum .* gradients would be 1/2 of those of the whole batch"
    ):
        dsframe.fit(Line(total), file(2))
    assert dsframe.fit(Line(total), file(1)).steps == 6
    assert 'with more ranks or accumulation the task needs loss_is = "sum"' in capsys.readouterr().err


def test_a_task_may_ask_whether_it_trains(capfd):
    """The looks at its loss are evaluations, also those that compute gradients."""

    class Asking(Line):
        def loss(self, outputs, targets):
            print("looked" if self.context.evaluating else "trained")
            return mean(outputs, targets)

    dsframe.fit(Asking(mean), file(2, steps=2))
    said = capfd.readouterr().out.split()
    assert (said.count("trained"), said.count("looked") > 8) == (4, True)


def test_dropout_of_a_row_is_its_own(capsys):
    dropping = Line(mean, model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout()))
    dsframe.fit(dropping, file(1, steps=2))
    assert "different outputs in different batches" not in capsys.readouterr().err


def test_a_sum_is_of_the_global_batch():
    one, two, four = (dsframe.fit(Line(total, loss_is="sum"), file(count)) for count in (1, 2, 4))
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert four.loss == pytest.approx(one.loss, rel=1e-6)
    assert one.loss == dsframe.fit(Line(total), file(1)).loss
    assert one.metrics["loss"] == pytest.approx(two.metrics["loss"], rel=1e-6)


def test_neither_is_announced_once(capsys):
    said = "neither a mean nor a sum over rows, so the training depends on the micro batch size"
    dsframe.fit(Line(by_batch), file(2, steps=2))
    assert capsys.readouterr().err.count(said) == 1
    dsframe.fit(Line(by_count), file(4, steps=2))
    assert capsys.readouterr().err.count(said) == 1
    dsframe.fit(Line(by_batch, batch_dependent=True), file(2, steps=2))
    assert said not in capsys.readouterr().err


@pytest.mark.parametrize("first", [9, 41])
def test_what_the_first_batch_does_not_show_is_announced_later(first, capsys):
    """From the second batch on, and from the sixth."""

    def ignoring(outputs, targets):
        return functional.cross_entropy(outputs, targets.argmax(1).masked_fill(targets[:, 0] > 9, -100))

    rows, targets = (data.repeat(2, 1) for data in Line(mean).train_data()._data)
    targets[first::5, 0] = 10
    data = {"train_data": lambda: TensorSource(rows, targets)}
    weighing = {"loss_weight": lambda targets: (targets[:, 0] <= 9).sum()}
    for more, times in ({}, 1), ({"batch_dependent": True}, 0), (weighing, 0):
        document = file(1, steps=first // 8 + 2)
        document["dsframe"]["order"] = "sequential"
        dsframe.fit(Line(ignoring, **data, **more), document)
        assert capsys.readouterr().err.count("from loss_weight(targets)") == times


def test_a_half_of_which_nothing_counts_is_no_other_kind(capsys):
    """Its mean is NaN: rows 0 and 3 of the four that are tried before the training, and of others in its steps."""

    def ignoring(outputs, targets):
        counts = targets[:, 0] <= 9
        loss = (mean_of_rows(outputs, targets) * counts).sum() / counts.sum()
        return loss * (loss / loss).detach()

    rows, targets = (data.clone() for data in Line(mean).train_data()._data)
    targets[::3, 0] = targets[8:12, 0] = 10
    task = Line(ignoring, train_data=lambda: TensorSource(rows, targets), loss_weight=lambda t: (t[:, 0] <= 9).sum())
    document = file(1, steps=4)
    document["dsframe"]["order"] = "sequential"
    dsframe.fit(task, document)
    said = capsys.readouterr().err
    assert "neither a mean nor a sum" not in said
    assert "beside other rows" not in said


def test_what_a_task_says_has_to_be_true():
    with pytest.raises(TaskError, match="gives a mean over the rows of a micro-batch, but the task says"):
        dsframe.fit(Line(mean, loss_is="sum"), file(1))
    with pytest.raises(TaskError, match='loss_is is \'total\'; write "mean" or "sum"'):
        dsframe.fit(Line(mean, loss_is="total"), file(1))


class Rows(Line):
    """Rows of a data set, with a model, a loss and a collate under test."""

    def __init__(self, loss, model, collate=None):
        super().__init__(loss)
        self._model, self.collate = model, collate

    def model(self):
        return self._model()

    def train_data(self):
        return TensorDataset(*super().train_data()._data)

    def eval_data(self):
        return None


class TimeFirst(nn.Linear):
    """Outputs ``[time, rows, classes]`` of rows with three numbers."""

    def forward(self, inputs):
        return super().forward(inputs).expand(6, *inputs.shape[:1], 4).log_softmax(-1)


class LossInside(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).square().sum()


class LossBeside(nn.Linear):
    def forward(self, inputs):
        outputs = super().forward(inputs)
        return {"outputs": outputs, "loss": outputs.square().sum()}


class OneSize(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.view(4, 3)).mean()


def ctc(reduction):
    def loss(outputs, targets):
        labels = targets.reshape(-1, 4)[:, :2].abs().round().long().clamp(1, 3)
        rows = len(labels)
        lengths = [torch.full((rows,), length) for length in (6, 2)]
        return functional.ctc_loss(outputs, labels, *lengths, reduction=reduction)

    return loss


def mixed(rows):
    inputs, targets = default_collate(rows)
    return (inputs + inputs.roll(1, 0)) / 2, targets


def mixed_a_little(rows):
    inputs, targets = default_collate(rows)
    return 0.9 * inputs + 0.1 * inputs.flip(0), targets


def padded(rows):
    """Rows of one to three numbers."""
    some = [inputs[: 1 + int((inputs[1:] > 0).sum())] for inputs, _ in rows]
    return nn.utils.rnn.pad_sequence(some, batch_first=True), torch.stack([targets for _, targets in rows])


class OfAll(nn.Linear):
    """Takes padding for numbers."""

    def forward(self, inputs):
        return super().forward(inputs.mean(1, keepdim=True))


def linear():
    return nn.Linear(3, 4)


SUM = "gives a sum over the rows of a micro-batch"
NEITHER = "neither a mean nor a sum over rows"
FORMS = {
    "time first, sum": (Rows(ctc("sum"), lambda: TimeFirst(3, 4)), SUM),
    "time first, mean": (Rows(ctc("mean"), lambda: TimeFirst(3, 4)), ""),
    "loss inside": (Rows(lambda loss, _: loss, lambda: LossInside(3, 4)), SUM),
    "loss beside": (Rows(lambda outputs, _: outputs["loss"], lambda: LossBeside(3, 4)), SUM),
    "collate mixes": (Rows(mean, linear, mixed), NEITHER),
    "collate mixes a little": (Rows(mean, linear, mixed_a_little), NEITHER),
    "collate": (Rows(mean, linear, default_collate), ""),
    "collate, worse half": (Rows(largest, linear, default_collate), NEITHER),
    "padding": (Rows(mean, lambda: OfAll(1, 4), padded), "the model sees padding"),
    "padding, mean over items": (Rows(by_count, lambda: OfAll(1, 4), padded), NEITHER),
    "one size": (Rows(lambda outputs, _: outputs, lambda: OneSize(3, 4)), "loss was not examined ("),
}


class ByName(nn.Linear):
    """Takes the mean of what it gets under a name."""

    def forward(self, x):
        return super().forward(x.mean(1, keepdim=True))


class Named(Rows):
    """Rows of one to three numbers, by names."""

    def train_data(self):
        rows = super().train_data()
        return [
            {"x": inputs[: 1 + int((inputs[1:] > 0).sum())].tolist(), "labels": targets.tolist()}
            for inputs, targets in (rows[number] for number in range(len(rows)))
        ]


@pytest.mark.parametrize("length", [None, 4])
def test_our_own_padding_to_the_longest_is_looked_at_as_a_collate_of_the_task(length, capsys):
    """Answers as positions in a text: cross entropy over positions counts padding, mask or not."""
    dsframe.fit(Named(mean, lambda: ByName(1, 4), Pad(length=length)), file(2))
    assert ("the model sees padding" in capsys.readouterr().err) == (length is None)


class InStream(Rows):
    """Its rows cannot be read again."""

    def train_data(self):
        rows = super().train_data()
        return Replayed([rows[number] for number in range(len(rows))])


class Replayed(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize(("loss", "unexamined"), [(mean, False), (by_count, True)])
def test_a_mean_over_the_rows_of_a_stream_is_examined(loss, unexamined, capsys):
    """With a collate it was said that it was not."""
    dsframe.fit(InStream(loss, linear, default_collate), file(1))
    assert ("loss was not examined" in capsys.readouterr().err) == unexamined


class InOrder(Line):
    """Classes one after the other, as a folder of images has them."""

    def train_data(self):
        inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
        return TensorSource(inputs, torch.arange(32) // 4 % 4)


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_what_halves_show_is_not_overruled_by_other_samples(order, capsys):
    weight, said = torch.tensor([1.0, 2.0, 3.0, 4.0]), file(1)
    said["dsframe"]["order"] = order
    dsframe.fit(InOrder(lambda outputs, classes: functional.cross_entropy(outputs, classes, weight)), said)
    assert NEITHER in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMS)
def test_the_kind_where_outputs_have_no_rows(form, capsys):
    task, said = FORMS[form]
    if said == SUM:
        with pytest.raises(TaskError, match=SUM):
            dsframe.fit(task, file(2))
        return
    dsframe.fit(task, file(2))
    printed = capsys.readouterr().err
    assert said in printed
    assert said or "this task's" not in printed
    assert said or "gives a row" not in printed


def writing(outputs, targets):
    return mean(outputs.mul_(2.0), targets.sub_(1.0))


class Holding(Line):
    """Its loss draws from a generator that the task holds."""

    def __init__(self, generator, draw):
        self.generator, self.draw = generator, draw

    def loss(self, outputs, targets):
        return mean(outputs, targets) * (1 + self.draw(self.generator))


def of_torch(generator):
    return torch.rand(1, generator=generator).item()


class Logging(Line):
    """Keeps its last loss, and a table that it makes once: nothing that moves a loss."""

    def loss(self, outputs, targets):
        if not hasattr(self, "scale"):
            self.scale = torch.ones(4)
        self.last = mean(outputs * self.scale, targets)
        self.history = [*getattr(self, "history", []), self.last.item()]
        return self.last


class Centred(Line):
    """Its loss gives a buffer another tensor: always, or where it is trained."""

    def __init__(self, always):
        self.always, self.centre = always, nn.BatchNorm1d(4, affine=False)

    def loss(self, outputs, targets):
        loss = mean(outputs - self.centre.running_mean, targets)
        if self.always or outputs.requires_grad:
            self.centre.running_mean = self.centre.running_mean + outputs.detach().mean(0)
        return loss


class Counting(LossInside):
    """A model with a state: a number, a tensor and a buffer that each forward pass moves, and random numbers."""

    def __init__(self):
        super().__init__(3, 4)
        self.calls, self.noise = 0, torch.zeros(())
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs):
        self.calls += 1
        self.noise += torch.rand(())
        self.scale *= 1.5
        return super().forward(inputs) * 1e-3 * (self.calls + self.noise) * self.scale / len(inputs)


class Once(nn.Linear):
    """Its outputs can be read once."""

    def forward(self, inputs):
        return iter([super().forward(inputs)])


TRACES = {
    "outputs that are read once": lambda: Rows(
        lambda outputs, targets: mean(next(outputs), targets), partial(Once, 3, 4)
    ),
    "draws": lambda: Line(drawing),
    "writes to its arguments": lambda: Line(writing),
    "draws of torch": lambda: Holding(torch.Generator().manual_seed(0), of_torch),
    "draws of NumPy": lambda: Holding(np.random.default_rng(0), np.random.Generator.normal),
    "draws of NumPy, old": lambda: Holding(np.random.RandomState(0), np.random.RandomState.normal),
    "draws of Python": lambda: Holding(random.Random(0), random.Random.random),
    "a buffer": lambda: Centred(True),
    "a buffer in training": lambda: Centred(False),
    "a buffer of the model": lambda: MovesModel(mean),
    "a model with a state": lambda: Rows(lambda loss, _: loss, Counting),
}


@pytest.mark.parametrize("kind", TRACES)
def test_the_look_leaves_no_trace(kind, monkeypatch):
    """The training goes on as if nobody had looked."""
    looked = dsframe.fit(TRACES[kind](), file(1)).loss
    monkeypatch.setattr("dsframe.training.loss_kind.LossTrial.watched", lambda _, batch, index: batch)
    monkeypatch.setattr("dsframe.training.loss_kind.LossTrial.look_at_samples", lambda *_, **__: "")
    monkeypatch.setattr("dsframe.training.sample_trial.is_needed", lambda *_: False)
    assert dsframe.fit(TRACES[kind](), file(1)).loss == looked


def with_noise(outputs, targets):
    return mean(outputs + torch.rand_like(outputs), targets)


def numpys(outputs, targets):
    return mean(outputs, targets) * (1 + np.random.rand())


def pythons(outputs, targets):
    return mean(outputs, targets) * (1 + random.random())


OTHERS = (
    "model or loss draws with NumPy, Python's random or a generator of its own (which no checkpoint has), for no sample"
)


class OwnGenerator(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)
        self.numbers = torch.Generator().manual_seed(0)

    def forward(self, inputs):
        return super().forward(inputs) * torch.rand((), generator=self.numbers)


class HoldsGenerator(OwnGenerator):
    def forward(self, inputs):
        return nn.Linear.forward(self, inputs)


class CountsRows(nn.Linear):
    """Nothing reads its buffer."""

    def __init__(self):
        super().__init__(3, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen += len(inputs)
        return super().forward(inputs)


class HoldsModel(Line):
    def model(self):
        self.net, self.unused = CountsRows(), nn.LazyLinear(1)
        return self.net


class MovesModel(HoldsModel):
    def loss(self, outputs, targets):
        self.net.seen += 1
        return mean(outputs / self.net.seen, targets)


class WritesInputs(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.mul_(2.0))


class DrawingHook(dsframe.Hooks):
    def on_step(self, run):
        np.random.rand()
        random.random()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Line(with_noise), "this task's loss draws random numbers, different ones on each rank"),
        (Line(numpys), OTHERS),
        (Line(pythons), OTHERS),
        (Rows(mean, OwnGenerator), OTHERS),
        (Centred(True), "loss changes centre.running_mean of the task"),
        (Centred(False), "loss changes centre.running_mean of the task"),
    ],
)
def test_what_a_loss_draws_and_changes_is_said(task, said, capsys):
    dsframe.fit(task, file(2))
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "task",
    [
        Line(mean),
        Logging(mean),
        HoldsModel(mean),
        Rows(mean, HoldsGenerator),
        Rows(mean, partial(WritesInputs, 3, 4)),
        Line(mean, hooks=[DrawingHook()]),
    ],
)
def test_nothing_else_is_said(task, capsys):
    """Of what the loss keeps for others, of a generator that is only held; what is called after the step may draw."""
    said = file(2)
    said["dsframe"]["per_sample_randomness"] = True
    assert dsframe.fit(task, said).steps == 6
    printed = capsys.readouterr().err
    assert "draws" not in printed
    assert "this task" not in printed


def test_draws_of_a_loss_belong_to_samples():
    def trained(loss, accumulation):
        said = file(accumulation)
        said["dsframe"]["per_sample_randomness"] = True
        return dsframe.fit(Line(loss), said).loss

    assert trained(with_noise, 1) == pytest.approx(trained(with_noise, 4), rel=1e-6)
    with pytest.raises(TaskError, match="a generator of its own: numbers that belong to no sample"):
        trained(numpys, 1)
    with pytest.raises(TaskError, match="the loss draws random numbers inside a function"):
        trained(lambda outputs, targets: mean(outputs[torch.randperm(len(outputs))], targets), 1)

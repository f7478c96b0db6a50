"""What a model keeps in attributes of its modules: said, or refused at a resume, where its loss depends on it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import dsframe
from dsframe.errors import TaskError
from dsframe.tools.compare import losses
from dsframe.training import restore, user_values
from dsframe.training.module_state import shortened
from tests.engines.foreign_tasks import Remembers, SeveralRemember
from tests.files import ds_config
from tests.lines import Line


def fit(folder, task, steps, settings=(), optimizer=(), **more):
    own = {"engine": "single", "steps": steps, "run_dir": str(folder), "order": "sequential", "log_every_steps": 1}
    file = ds_config(8, optimizer or {"type": "AdamW", "params": {"lr": 0.01}}, **own | dict(settings))
    if isinstance(task, str):
        task = SeveralRemember() if task == "several" else Remembers(what=task)
    dsframe.fit(task, file, **more)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("carried", "carried"),
        ("mean", "mean"),
        ("queue", "queue"),
        ("calls", "calls"),
        ("warm", "calls"),
        ("several", "one.carried"),
        ("nothing", ""),
    ],
)
def test_a_state_is_said_and_a_resume_refused(what, names, tmp_path, capsys):
    fit(tmp_path, what, 2)
    said = "from one forward pass to the next, and its loss depends on them"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if said in line] or [""]
    assert (names in line) if names else not line
    if not names:
        fit(tmp_path, what, 4, resume="auto")
        return
    with pytest.raises(TaskError, match=rf"{said} \(.*{names}.*: no checkpoint has them"):
        fit(tmp_path, what, 4, resume="auto")


class Meter:
    """As programs have them, to follow a mean."""

    mean = 0.0

    def follow(self, value):
        self.mean = 0.5 * self.mean + value


class Derived(Meter):
    """Has its attributes from another class."""


class Slotted:
    """Has its attribute in a slot."""

    __slots__ = ("mean",)
    follow = Meter.follow

    def __init__(self):
        self.mean = 0.0


class Ticks:
    """As itertools.count, with an attribute."""

    count = 0

    def __next__(self):
        self.count += 1
        return self.count - 1


KEPT = {
    "array": lambda: np.zeros(1),
    "float64": lambda: np.float64(0),
    "derived": Derived,
    "slotted": Slotted,
}


def followed(holder, value):
    """The mean that ``holder.kept`` follows, after ``value``."""
    kept = holder.kept
    if hasattr(kept, "__next__"):
        return 1.0 + next(kept)
    if isinstance(kept, (Meter, Slotted)):
        kept.follow(value)
        return kept.mean
    if isinstance(kept, np.ndarray):
        kept *= 0.5
        kept += value
        return float(kept[0])
    holder.kept = type(kept)(0.5 * kept + value)
    return float(holder.kept)


class Follower(nn.Linear):
    def __init__(self, kept):
        super().__init__(8, 3)
        self.kept = kept

    def forward(self, rows):
        return followed(self, float(rows.abs().mean())) * super().forward(rows)


class Follows(Remembers):
    """Keeps a mean in the model, or in the task."""

    def __init__(self, kept, *, in_task):
        self.made, self.in_task, self.kept = kept, in_task, kept if in_task else None

    def model(self):
        return nn.Linear(8, 3) if self.in_task else Follower(self.made)

    def loss(self, outputs, targets):
        loss = super().loss(outputs, targets)
        return loss * followed(self, float(loss.detach())) if self.in_task else loss


@pytest.mark.parametrize("in_task", [False, True])
def test_the_look_moves_no_state_of_any_kind(in_task, tmp_path, capsys):
    """In arrays of NumPy, counters and objects it moved: 7e-2 in the losses of one process."""
    fit(tmp_path / "float", Follows(0.0, in_task=in_task), 3)
    for kind, kept in KEPT.items():
        fit(tmp_path / kind, Follows(kept(), in_task=in_task), 3)
        assert losses(tmp_path / kind) == losses(tmp_path / "float"), kind
    said = [line for line in capsys.readouterr().err.splitlines() if "keeps values in attributes" in line]
    assert len(said) == 1 + len(KEPT)


@pytest.mark.parametrize("in_task", [False, True])
def test_the_look_moves_no_counter(in_task, tmp_path):
    for kind, kept in {"ticks": Ticks(), "count": itertools.count(), "list": iter([*range(99)])}.items():
        fit(tmp_path / kind, Follows(kept, in_task=in_task), 3)
        assert losses(tmp_path / kind) == losses(tmp_path / "ticks"), kind


class Scaled(nn.Module):
    """Counts its calls, and has a factor that a hook sets."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.factor = nn.Linear(8, 3), 0, 1.0
        self.factors = []

    def forward(self, rows):
        self.calls += 1
        if self.training:
            self.factors.append(self.factor)
        return self.factor * self.layer(rows)


class SetByHook(Remembers, dsframe.Hooks):
    """Its hook sets the factor after each step."""

    def __init__(self):
        self.hooks, self.scaled = [self], Scaled()

    def model(self):
        return self.scaled

    def on_step(self, run):
        self.scaled.factor += 1.0


def test_what_a_hook_sets_after_the_first_step_stays(tmp_path):
    task = SetByHook()
    fit(tmp_path, task, 3)
    assert task.scaled.factors == [1.0, 2.0, 3.0]


class Later(SetByHook):
    """A hook sets the factor once: after a step."""

    def __init__(self, step, owner):
        super().__init__()
        self.step, self.owner, self.weight = step, owner, 1.0

    def on_step(self, run):
        if run.step == self.step:
            vars(self.scaled if self.owner == "model" else self)["factor" if self.owner == "model" else "weight"] = 2.0

    def loss(self, outputs, targets):
        return self.weight * super().loss(outputs, targets)


@pytest.mark.parametrize(("step", "owner", "said"), [(2, "model", "factor"), (3, "task", "weight"), (5, "task", "")])
def test_what_a_hook_sets_later_is_said_when_it_is_saved(step, owner, said, tmp_path, capsys):
    fit(tmp_path, Later(step, owner), 4, {"checkpoints": {"every_steps": 1}})
    printed = capsys.readouterr().err
    assert printed.count("changed in training, and no checkpoint has it") == bool(said)
    assert f"dsframe: {said} changed" in printed or not said


class Parts(nn.Module):
    """What no weight and no saved buffer is: parts without weights, modes, hooks, values that forward reads."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.act = nn.Linear(8, 3), nn.BatchNorm1d(3), nn.LeakyReLU()
        self.register_buffer("prior", torch.ones(3), persistent=False)
        self.shift, self.modes = torch.zeros(3), []

    def forward(self, rows):
        self.modes += [self.norm.training] * self.training
        return self.scale * self.act(self.norm(self.body(rows))) * self.prior + self.shift


class Turned(Remembers, dsframe.Hooks):
    """A hook changes one of these, or the criterion, at a step."""

    def __init__(self, change, step):
        self.hooks, self.change, self.step = [self], change, step
        self.criterion, self.net = nn.CrossEntropyLoss(), Parts()

    def model(self):
        return self.net

    def loss(self, outputs, targets):
        return self.criterion(outputs, targets)

    def on_step(self, run):
        if run.step == self.step:
            CHANGES[self.change](self)


class Halving:
    """A hook that is an object."""

    def __call__(self, module, inputs, outputs):
        return outputs / 2


CHANGES = {
    "act": lambda task: setattr(task.net, "act", nn.GELU()),
    "act.negative_slope": lambda task: setattr(task.net.act, "negative_slope", 0.5),
    "hooks of act": lambda task: task.net.act.register_forward_hook(lambda module, inputs, outputs: outputs / 2),
    "hooks of norm": lambda task: task.net.norm.register_full_backward_hook(lambda module, of_inputs, of_outputs: None),
    "hooks of body": lambda task: task.net.body.weight.register_hook(lambda gradient: gradient / 2),
    "hooks of model": lambda task: task.net.register_forward_hook(Halving()),
    "body": lambda task: setattr(task.net.body, "forward", lambda rows: rows[:, :3]),
    "norm.training": lambda task: task.net.norm.eval(),
    "prior": lambda task: task.net.prior.mul_(2),
    "shift": lambda task: task.net.shift.add_(1),
    "criterion": lambda task: setattr(task, "criterion", nn.CrossEntropyLoss(label_smoothing=0.2)),
    "criterion.label_smoothing": lambda task: setattr(task.criterion, "label_smoothing", 0.2),
    "Parts.scale": lambda task: setattr(Parts, "scale", 2.0),
}


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_hook_changes_beside_weights_is_said(change, step, tmp_path, capsys, monkeypatch):
    """A resumed run had the old one, silently: 1e-1 in its losses."""
    monkeypatch.setattr(Parts, "scale", 1.0)
    fit(tmp_path, Turned(change, step), 3)
    printed = capsys.readouterr().err
    assert (
        f"a hook changes {change}, which no checkpoint has" if step == 1 else f"{change} changed in training"
    ) in printed


class Adding(Remembers):
    """Its first loss adds a hook to a module."""

    def model(self):
        self.net, self.added = Parts(), False
        return self.net

    def loss(self, outputs, targets):
        if not self.added and not self.context.evaluating:
            self.added = True
            CHANGES["hooks of act"](self)
        return super().loss(outputs, targets)


def test_parts_that_the_first_step_replaces_are_said(tmp_path, capsys):
    fit(tmp_path, Adding(), 2)
    assert "hooks of act changed in training, and no checkpoint has it" in capsys.readouterr().err


class Evaluating(Parts):
    """Whose norm is never trained."""

    def forward(self, rows):
        self.norm.eval()
        return super().forward(rows)


class Quiet(Turned):
    """Counts its losses."""

    calls = 0

    def loss(self, outputs, targets):
        self.calls += 1
        return super().loss(outputs, targets)


class Calls(dsframe.Hooks):
    """Keeps the steps."""

    def __init__(self):
        self.steps = []

    def on_step(self, run):
        self.steps.append(run.step)


def test_nothing_is_said_of_hooks_that_change_nothing(tmp_path, capsys):
    task = Quiet("act", 9)
    task.net, task.hooks = Evaluating(), [task, Calls()]
    fit(tmp_path, task, 3, {"eval_every_steps": 1})
    printed = capsys.readouterr().err
    assert "changed in training" not in printed
    assert "a hook changes" not in printed


def test_a_mode_that_a_hook_sets_after_the_first_step_stays(tmp_path):
    """The look at that step put it back into training mode: 2e-1 in the next loss."""
    task = Turned("norm.training", 1)
    fit(tmp_path, task, 3)
    assert task.net.modes == [True, False, False]


class Judging(Scaled):
    """Keeps the factor of each evaluation."""

    def forward(self, rows):
        self.factor += not self.training
        self.factors.append(self.factor)
        return self.layer(rows)


class Judged(SetByHook):
    """Its first batch is evaluated before the training."""

    def __init__(self):
        self.scaled = Judging()

    def eval_data(self):
        return self.train_data()


def test_the_evaluation_before_the_training_moves_no_attribute(tmp_path):
    """It did, and the training went on with what it left: 5e-3 in the first loss."""
    task = Judged()
    fit(tmp_path, task, 1, {"eval_every_steps": 9})
    assert task.scaled.factors[0] == 1.0


def test_the_evaluation_before_the_training_moves_no_attribute_of_a_model_alone(tmp_path):
    """Of one that the task does not hold."""
    made = []

    class Apart(Judged):
        def __init__(self):
            pass

        def model(self):
            made.append(Judging())
            return made[-1]

    fit(tmp_path, Apart(), 1, {"eval_every_steps": 9})
    assert made[0].factors[0] == 1.0


class OtherInEvaluation(Scaled):
    def forward(self, rows):
        outputs = super().forward(rows)
        return outputs if self.training else {"scores": outputs}


def test_a_model_that_evaluates_otherwise_is_looked_at_as_it_trains(tmp_path, capsys):
    task = SetByHook()
    task.scaled = OtherInEvaluation()
    fit(tmp_path, task, 2)
    assert "attributes" not in capsys.readouterr().err


class Once(Scaled):
    """Computes nothing without gradients, by a name that a look at its code does not see."""

    def forward(self, rows):
        assert getattr(torch, "is_" + "grad_enabled")()
        return super().forward(rows)


def test_what_cannot_be_looked_at_is_no_reason_to_refuse(tmp_path, capsys):
    task = SetByHook()
    task.scaled = Once()
    fit(tmp_path, task, 2)
    assert "changes attributes in its forward pass (calls, factors); whether its loss" in capsys.readouterr().err


class Names(nn.LSTM):
    """Has other names for its weights, and values of its own."""

    def __init__(self):
        super().__init__(2, 2)
        self.alias, self.weights = self.weight_ih_l0.data, [self.weight_hh_l0]
        self.array = self.alias.numpy()
        self.pair, self.by_name = (torch.zeros(2), 1), {"x": torch.zeros(1)}

    def forward(self, input, hx=None):  # torch's names
        self.pair, self.by_name["x"] = (input[0, 0], 2), input.mean()
        return super().forward(input, hx)


def test_the_fifth_name_is_counted():
    assert [shortened(["a"] * count) for count in (4, 5)] == ["a, a, a, a", "a, a, a, a and 1 more"]


def test_names_of_weights_are_no_state():
    model = Names()
    before = user_values.attributes(model)
    model(torch.ones(3, 1, 2))[0].sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    trained = model.weight_ih_l0.clone()
    assert before.changed() == {"pair", "by_name"}
    before.put_back()
    assert not before.changed()
    assert model.pair[1] == 1
    assert model.by_name["x"] == 0
    assert torch.equal(model.weight_ih_l0, trained)


class Counted(nn.Linear):
    """Counts rows in a buffer that no checkpoint has, as DeepSpeed's experts do."""

    def __init__(self):
        super().__init__(8, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, rows):
        self.seen += len(rows)
        return super().forward(rows)


class Counts(Remembers):
    def model(self):
        return Counted()


def test_a_count_that_nothing_depends_on_may_be_lost(tmp_path, capsys):
    fit(tmp_path, Counts(), 2)
    fit(tmp_path, Counts(), 4, resume="auto")
    assert "depend" not in capsys.readouterr().err


class Counting(nn.Module):
    """Counts forward passes in a buffer, as an annealing by steps does; or for a log."""

    def __init__(self, power):
        super().__init__()
        self.inner, self.power = nn.Linear(8, 1), power
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows):
        self.calls += self.training
        return self.inner(rows) * self.calls.clone() ** self.power


@pytest.mark.parametrize(
    ("power", "accumulation", "meant", "said"),
    [(1.0, 2, False, True), (1.0, 1, False, False), (0.0, 2, False, False), (1.0, 2, True, False)],
)
def test_buffers_that_count_forward_passes_are_said(power, accumulation, meant, said, tmp_path, capsys):
    class Task(Line):
        batch_dependent, inputs, rows = meant, 8, 16

        def model(self):
            return Counting(power)

    accumulated = {"gradient_accumulation_steps": accumulation}
    dsframe.fit(Task(), ds_config(8, "SGD", 0.01, accumulated, engine="single", steps=1, run_dir=str(tmp_path)))
    assert ("model's loss depends on calls, which each forward pass changes" in capsys.readouterr().err) is said


@pytest.mark.parametrize("make", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_spectral_norm_follows_each_forward_pass(make, tmp_path, capsys):
    class Task(Line):
        inputs = 8

        def model(self):
            return nn.Sequential(make(nn.Linear(8, 4)), nn.Tanh(), nn.Linear(4, 1))

    accumulated = {"gradient_accumulation_steps": 2}
    dsframe.fit(Task(), ds_config(8, "SGD", 0.01, accumulated, engine="single", steps=1, run_dir=str(tmp_path)))
    assert "_u, " in capsys.readouterr().err


class _Tracking(nn.Linear):
    """Follows the size of its outputs in training; evaluations alone are divided by it."""

    def __init__(self, *, saves):
        super().__init__(2, 1)
        self.register_buffer("size", torch.ones(()), persistent=saves)
        self.last = torch.ones(())

    def forward(self, input):  # torch's name
        outputs = super().forward(input)
        if self.training:
            self.size = 0.5 * self.size + outputs.detach().abs().mean()
            self.last = outputs.detach().mean()  # which each step makes anew
            return outputs
        return outputs / self.size + self.last * 1e-3


class Tracks(Line):
    def __init__(self, *, saves):
        self.saves = saves

    def model(self):
        return _Tracking(saves=self.saves)


@pytest.mark.parametrize("saves", [False, True])
def test_a_state_that_evaluations_need_is_said_and_a_resume_refused(saves, tmp_path, capsys):
    fit(tmp_path, Tracks(saves=saves), 2)
    assert ("its evaluation depends on them (last, size)" in capsys.readouterr().err) != saves
    if saves:
        fit(tmp_path, Tracks(saves=saves), 4, resume="auto")
        return
    with pytest.raises(TaskError, match=r"its evaluation depends on them"):
        fit(tmp_path, Tracks(saves=saves), 4, resume="auto")


class Holder(nn.Module):
    """Values of every kind in attributes."""

    def __init__(self):
        super().__init__()
        self.count, self.flag, self.table, self.large = 1, True, torch.ones(1 << 18), torch.ones((1 << 18) + 1)
        self.rows, self.gone = [torch.ones(2)], 1.0

    def forward(self):
        return self.count, self.flag, self.table, self.large, self.rows, self.gone, self.made


def test_a_copy_for_the_whole_training_has_no_large_values():
    model = Holder()
    whole = user_values.attributes(model)
    small = whole.small()
    for tensor in (model.table, model.large):
        tensor.add_(1)
    model.flag = 1  # which equals True
    assert whole.changed() == {"flag", "table", "large"}
    assert small.changed() == {"flag", "table"}


def test_small_buffers_that_change_or_go_are_put_back():
    module = nn.Module()
    for name, size in (("few", 2), ("many", 3), ("gone", 1)):
        module.register_buffer(name, torch.ones(size))
    held = restore.Buffers([("part", module)], most_elements=2)
    module.few += 1
    module.many += 1
    del module.gone
    assert held.changed() == {"part.few", "part.gone"}
    held.put_back()
    assert [buffer.tolist() for buffer in module.buffers()] == [[1, 1], [2, 2, 2], [1]]


def test_values_are_put_back_in_the_same_objects():
    """What is new goes, what was replaced comes again."""
    model = Holder()
    table, rows = model.table, model.rows
    before = user_values.attributes(model)
    model.table.add_(1)
    model.rows.append(torch.zeros(1))
    model.rows, model.table, model.count, model.made = [], torch.zeros(1), 5, 2
    del model.gone
    before.put_back()
    assert model.table is table
    assert table.eq(1).all()
    assert model.rows is rows
    assert [part.tolist() for part in rows] == [[1.0, 1.0]]
    assert (model.count, model.gone, hasattr(model, "made")) == (1, 1.0, False)

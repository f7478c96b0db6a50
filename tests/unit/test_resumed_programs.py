"""Programs that keep something of their own, in one process: in one piece, and from a checkpoint on."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import dsframe
from dsframe.errors import TaskError
from dsframe.tasks.task import sums
from dsframe.tools import export
from dsframe.tools.compare import losses
from dsframe.training.halves import kind_of_parts
from tests.engines.foreign_tasks import ExtraState, GrowingBuffer, Rows
from tests.files import ds_config
from tests.unit.test_module_state import fit


def goes_on(make, folder, **settings):
    every = {"checkpoints": {"every_steps": 1}, **settings}
    fit(folder / "whole", make(), 5, every)
    for steps in (3, 5):
        fit(folder / "parts", make(), steps, every, resume="auto")
    whole, parts = losses(folder / "whole"), losses(folder / "parts")
    assert {step: parts[step] for step in whole} == whole


def normed():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Averaged(Rows):
    """The student is called, in training mode, behind its update: its statistics move on, and the teacher's do not."""

    model = dsframe.Task.model
    loss = dsframe.Task.loss

    def models(self):
        return {
            "student": normed,
            "head": partial(nn.Linear, 3, 3),
            "teacher": dsframe.average_of("student", 0.5),
        }

    def losses(self):
        return {"student": self.of_student, "head": self.of_head}

    def of_student(self, models, rows, targets):
        with torch.no_grad():
            wanted = models["teacher"](rows).softmax(-1)
        scores = models["student"](rows)
        return nn.functional.cross_entropy(scores, targets) + nn.functional.cross_entropy(scores, wanted)

    def of_head(self, models, rows, targets):
        return nn.functional.cross_entropy(models["head"](models["student"](rows)), targets)


def test_a_teacher_goes_on_as_it_was(tmp_path, capsys):
    goes_on(Averaged, tmp_path)
    assert "the average of the weights" not in capsys.readouterr().err


class Shared(Averaged):
    def __init__(self):
        self.common = nn.Linear(8, 3)

    def models(self):
        return {name: lambda: nn.Sequential(self.common, nn.Linear(3, 3)) for name in ("student", "head")}


def test_what_two_models_share_is_refused(tmp_path):
    with pytest.raises(
        TaskError, match=r"Shared\.models: 'head' and 'student' share head\.0, and each is trained by a loss"
    ):
        fit(tmp_path, Shared(), 2)


class Dropped(Rows, dsframe.Hooks):
    """Its hooks draw random numbers, where the last step is logged too: the run that ends earlier has another last one."""

    def __init__(self):
        self.hooks = [self]

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    def eval_data(self):
        return self.train_data()

    def on_start(self, run):
        torch.randn(3)

    def on_log(self, run, figures):
        torch.randn(3)

    def on_evaluation(self, run, metrics):
        torch.randn(3)

    def on_checkpoint(self, run, path):
        torch.randn(3)


def test_what_hooks_draw_is_not_the_trainings(tmp_path):
    goes_on(Dropped, tmp_path, eval_every_steps=2, log_every_steps=50)


class Counting(torch.optim.SGD):
    """As schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] /= group["k"]
        return super().step(closure)


class Counted(Rows):
    def optimizer(self, groups, **params):
        return Counting(groups, **params)


def test_an_optimizers_count_is_said_and_a_resume_refused(tmp_path, capsys):
    how = {"type": "task", "params": {"lr": 0.5}}
    fit(tmp_path, Counted(), 2, optimizer=how)
    assert "this optimizer keeps param_groups[0]['k']" in capsys.readouterr().err
    with pytest.raises(TaskError, match=r"keeps param_groups\[0\]\['k'\].* keep it in self.state\[parameter\]"):
        fit(tmp_path, Counted(), 4, optimizer=how, resume="auto")
    fit(tmp_path / "own", Rows(), 2, optimizer={"type": "torch.optim:RMSprop", "params": {"lr": 0.01}})
    assert "keeps" not in capsys.readouterr().err


class Kept(torch.optim.Optimizer):
    """Keeps something about each parameter, as copies of torch's optimizers keep their steps."""

    def __init__(self, params, lr, what):
        super().__init__(params, {"lr": lr})
        self.what = what

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state, factor = self.state[parameter], 1.0
            if self.what == "tensor":
                steps = state.setdefault("step", torch.tensor(0))
                steps += 1  # a number would stay in the state as it is
                factor = 1 / steps.item()
            elif self.what == "number":
                state["count"] = state.get("count", 0) + 1
                factor = 1 / state["count"]
            elif self.what == "bool":
                factor = 0.5 if state.get("first", True) is True else 1.0
                state["first"] = False
            elif self.what == "list":
                state.setdefault("sizes", []).append(1.0)
            else:
                state["signs"] = parameter.grad > 0
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] * factor)


class Keeping(Rows):
    def __init__(self, what):
        self.what = what

    def optimizer(self, groups, **params):
        return Kept(groups, what=self.what, **params)


@pytest.mark.parametrize("what", ["tensor", "number", "bool"])
def test_numbers_of_an_optimizer_go_on_as_they_were_kept(what, tmp_path):
    how = {"type": "task", "params": {"lr": 0.5}}
    fit(tmp_path / "whole", Keeping(what), 4, optimizer=how)
    for steps in (2, 4):
        fit(tmp_path / "parts", Keeping(what), steps, optimizer=how, resume="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize(("what", "name"), [("list", "'sizes'] (list)"), ("signs", "'signs'] (bool)")])
def test_state_that_no_checkpoint_has_is_said_and_a_resume_refused(what, name, tmp_path, capsys):
    how = {"type": "task", "params": {"lr": 0.5}}
    fit(tmp_path, Keeping(what), 2, optimizer=how)
    assert f"this optimizer keeps state[...][{name}" in capsys.readouterr().err
    with pytest.raises(TaskError, match=r"keep it in self\.state"):
        fit(tmp_path, Keeping(what), 4, optimizer=how, resume="auto")


def test_sums_of_bools_and_narrow_numbers_add_up():
    every = [sums({"a": dsframe.Sum(torch.tensor(True), torch.tensor(200, dtype=torch.uint8))}, "A")["a"]] * 3
    total = every[0] + every[1] + every[2]
    assert (float(total.total), float(total.count)) == (3.0, 600.0)


def test_samples_without_items_say_nothing_of_a_loss():
    assert kind_of_parts([1.0, 1.0, 1.0], [0, 0, 0], 1e-3) == ""


class Many(TensorDataset):
    """Read by lists of indices, as torch's DataLoader reads it; one by one the rows are others."""

    def __getitems__(self, indices):
        return [TensorDataset.__getitem__(self, index) for index in indices]

    def __getitem__(self, index):
        rows, label = super().__getitem__(index)
        return rows + 1, label


class Alone(Many):
    __getitem__ = torch.utils.data.Dataset.__getitem__


@pytest.mark.parametrize("kind", [Many, Alone])
def test_a_data_set_that_is_read_by_lists(kind, tmp_path):
    task, lists = Rows(), Rows()
    lists.train_data = lambda: kind(*Rows().train_data().tensors)
    for one, name in ((task, "one"), (lists, "lists")):
        fit(tmp_path / name, one, 2)
    assert losses(tmp_path / "one") == losses(tmp_path / "lists")


class Doubled(Rows):
    """Rows of one class come twice."""

    def collate(self, rows):
        every = rows + [row for row in rows if row[1] == 2]
        return torch.stack([row for row, _ in every]), torch.stack([label for _, label in every])


class DoubledAndWeighed(Doubled):
    def loss_weight(self, targets):
        return torch.tensor(float(len(targets)))


def test_a_collate_of_other_numbers_of_rows_is_said(tmp_path, capsys):
    fit(tmp_path / "a", Doubled(), 5)
    assert capsys.readouterr().err.count("collate makes micro-batches of") == 1
    fit(tmp_path / "b", DoubledAndWeighed(), 5)
    assert "collate makes" not in capsys.readouterr().err


class OwnState(GrowingBuffer):
    """A buffer that grows, and under two names a module with an extra state."""

    def model(self):
        scaled = ExtraState().model()[0]
        return nn.Sequential(*super().model()[:2], nn.Linear(16, 8), scaled, scaled, nn.Linear(8, 3))


def test_a_model_has_its_own_state_again_wherever_it_is_loaded(tmp_path, capsys):
    goes_on(OwnState, tmp_path)
    run = tmp_path / "parts"
    model = dsframe.load_model(run, OwnState())
    assert [len(model[0].bank), len(model[3].scales)] == [6, 1011]
    other = OwnState().model()
    other[0].bank = torch.zeros(6)  # load_state_dict resizes none
    other.load_state_dict(torch.load(export.export(run, "torch")))
    assert other[3].scales == model[3].scales
    assert "_extra_state" not in load_file(export.export(run))
    assert (
        "3._extra_state, 4._extra_state: no tensor, so it is left out; --to torch writes it" in capsys.readouterr().err
    )


class OwnStates(Averaged):
    """The same in the student: the teacher's has not moved on either."""

    def models(self):
        return {**super().models(), "student": OwnState().model}


def test_a_teacher_has_its_own_state_again(tmp_path):
    goes_on(OwnStates, tmp_path)


class Unsaved(Rows):
    """An extra state of an object, or one that nothing reads again."""

    def __init__(self, what):
        self.what = what

    def model(self):
        class Layer(nn.Linear):
            def get_extra_state(self):
                return Path()

        class Both(Layer):
            def set_extra_state(self, state):
                pass

        return (Both if self.what == "object" else Layer)(8, 3)


@pytest.mark.parametrize(
    ("what", "words"), [("object", "cannot be saved .*: let it return tensors"), ("one way", "no set_extra")]
)
def test_an_extra_state_that_no_resume_has_is_refused(what, words, tmp_path):
    with pytest.raises(TaskError, match=words):
        fit(tmp_path / "run", Unsaved(what), 3)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not losses(tmp_path / "run")


def test_an_extra_state_that_counts_forward_passes_depends_on_accumulation(tmp_path, capsys):
    file = ds_config(8, "AdamW", 0.01, engine="single", steps=1, run_dir=str(tmp_path / "run"))
    for passes in (1, 2):
        dsframe.fit(ExtraState(), {**file, "gradient_accumulation_steps": passes})
        said = "loss depends on 0._extra_state, which each forward pass changes" in capsys.readouterr().err
        assert said == (passes == 2)

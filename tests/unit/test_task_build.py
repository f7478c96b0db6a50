"""From the file's task section to a Task: every way in which a user's class can be wrong has its message."""

import math
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import dsframe
from dsframe.config.schema.settings import CustomTask
from dsframe.errors import TaskError
from dsframe.tasks import Sum, Task, build, build_hooks
from dsframe.tasks.task import sums
from tests.files import ds_config
from tests.lines import Line

MODULE = """
    import torch
    import dsframe
    from torch.utils.data import TensorDataset

    class Line(dsframe.Task):
        def __init__(self, slope: float = 2.0, *, points: int = 8):
            self.slope, self.points = slope, points

        def model(self):
            return torch.nn.Linear(1, 1)

        def loss(self, outputs, targets):
            return torch.nn.functional.mse_loss(outputs, targets)

        def train_data(self):
            x = torch.linspace(0, 1, self.points)[:, None]
            return TensorDataset(x, self.slope * x)

    class Plain:
        pass

    number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory with a user's package, not on the path, as for a console script."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    for name, text in {
        "mine/lines.py": MODULE,
        "mine/needs.py": "import not_installed_anywhere",
        "mine/broken.py": "x = 1\nraise ValueError('oh no')",
        "mine/unparsed.py": "x = 1\ndef f(:\n",
        "mine/empty.py": "",
    }.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for module in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[module]


def user(name, **options):
    return build(CustomTask.model_construct(name=name, options=options), seed=5)


def test_a_users_task_takes_its_options_and_the_seed():
    task = user("mine.lines:Line", slope=3.0, points=4)
    assert task.seed == 5
    assert len(task.train_data()) == 4
    outputs, targets = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [2.0], [6.0]])
    assert task.loss(outputs, targets) == 3
    assert task.metrics(outputs, targets) == {"loss": Sum(torch.tensor(9.0), 3)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "visoin",
            r'not one of vision, language, .* and not of the form "package.module:Class"; did you mean "vision"\?',
        ),
        ("mine.lines", "not of the form"),
        ("./mine/lines.py:Line", r'write "mine.lines:Line", the module'),
        ("nowhere.lines:Line", r"no module named nowhere; searched /.*, "),
        ("mine.line:Line", r'no module named mine.line; did you mean "lines"\?; searched /'),
        ("mines.lines:Line", r'no module named mines; did you mean "mine"\?'),
        ("mine.needs:Line", "mine.needs imports not_installed_anywhere, which is not installed"),
        ("mine.broken:Line", r"importing mine.broken failed: /.*broken.py:2: ValueError: oh no"),
        ("mine.unparsed:Line", r"importing mine.unparsed failed: /.*unparsed.py:2: SyntaxError"),
        ("mine.lines:Lime", r'has no Lime; its tasks: Line; did you mean "Line"\?'),
        ("mine.empty:Line", "has no Line; its tasks: none"),
        ("mine.lines:Plain", r"Plain is not a task; write \"class Plain\(dsframe.Task\)\""),
        ("mine.lines:number", "number is not a task; write"),
    ],
)
def test_what_cannot_be_imported_is_explained(name, message):
    with pytest.raises(TaskError, match=message) as error:
        user(name)
    assert str(error.value).startswith(f'task "{name}": ')
    assert error.value.exit_code == 5


def test_wrong_options_name_the_right_ones():
    with pytest.raises(TaskError) as error:
        user("mine.lines:Line", slop=1.0)
    assert str(error.value) == (
        "task \"mine.lines:Line\": options do not fit: got an unexpected keyword argument 'slop'; "
        'did you mean "slope"?; it takes (slope: float = 2.0, *, points: int = 8)'
    )


def test_numbers_that_a_constructor_draws_are_of_the_seed():
    drawn = "import dsframe, torch\nclass T(dsframe.Task):\n    def __init__(self): self.n = float(torch.rand(()))\n"
    Path("mine/drawn.py").write_text(drawn)
    before = torch.get_rng_state()
    assert user("mine.drawn:T").n == user("mine.drawn:T").n
    assert before.equal(torch.get_rng_state())


def test_hooks_of_the_file_come_first_and_are_made_without_arguments():
    hooks = "import dsframe\nclass A(dsframe.Hooks):\n    def __init__(self, *a, **b): pass\n"
    Path("mine/hooks.py").write_text(hooks + "class B(dsframe.Hooks):\n    def __init__(self, n): pass\n")
    of_file, of_task = build_hooks(["mine.hooks:A"], [own := dsframe.Hooks()])
    assert (type(of_file).__name__, of_task) == ("A", own)
    with pytest.raises(TaskError, match=r'hook "mine.hooks:B": its class needs n; give them defaults'):
        build_hooks(["mine.hooks:B"], [])


def test_a_task_without_options_says_so():
    Path("mine/bare.py").write_text("import dsframe\nclass T(dsframe.Task):\n    pass\n")
    with pytest.raises(TaskError, match=r"unexpected keyword argument 'n'; it takes \(\)"):
        user("mine.bare:T", n=2)


def test_a_bug_in_the_users_constructor_is_not_hidden():
    Path("mine/bug.py").write_text(
        "import dsframe\nclass T(dsframe.Task):\n    def __init__(self, n=1):\n        len(n)\n"
    )
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        user("mine.bug:T", n=2)


def test_a_task_without_its_methods_says_which():
    class Half(Task):
        pass

    task = Half()
    for call, name in [
        (task.model, r"model\(\) or layers\(\)"),
        (task.train_data, r"train_data\(\)"),
        (lambda: task.loss(None, None), r"loss\(outputs, targets\)"),
    ]:
        with pytest.raises(TaskError, match=f"Half must define {name}"):
            call()


def test_sums_are_exact_means():
    total = Sum(torch.tensor(3.0), 2) + Sum(torch.tensor(6.0), torch.tensor(1))
    assert total.mean == 3
    assert math.isnan(Sum(torch.tensor(0.0), 0).mean)


@pytest.mark.parametrize("total", [3, torch.tensor(3), torch.tensor([3.0])])
def test_a_total_may_be_a_number(total):
    found = sums({"right": Sum(total, 4)}, "")["right"]
    assert isinstance(found.total, torch.Tensor)
    assert (found.total.shape, found.count, found.mean) == ((), 4, 0.75)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"right": torch.tensor(0.75)}, "'right' is Tensor"),
        ({"right": Sum(torch.ones(2), 2)}, r"'right' has a total of shape \[2\]"),
        ({"right": Sum("3", 4)}, "'right' has a total that is str"),
        ({"right": Sum(torch.tensor(3.0), torch.ones(2))}, r"'right' has a count of shape \[2\]"),
        (0.75, "float is not a mapping"),
    ],
)
def test_metrics_that_are_no_sums_are_refused(found, said):
    with pytest.raises(TaskError, match=rf"^Counting\.metrics: {said}; give .*dsframe\.Sum\(total, count\)"):
        sums(found, "Counting.metrics")


def clamped(task, name, weight):
    weight.clamp_(-0.01, 0.01)


def backwards(task, epoch, samples):
    return torch.arange(samples).flip(0)


def halved(task, targets):
    return 0.5 * len(targets) if targets.sum() > 0 else len(targets)


METHODS = {"after_step": clamped, "order": backwards, "loss_weight": halved}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_in_an_attribute_is_the_tasks_too(name):
    """They were left out, silently, but for loss() and model()."""

    def trained(task):
        own = {"engine": "single", "steps": 3, "run_dir": "run"}
        file = ds_config(8, "SGD", 0.1, **own) | {"gradient_accumulation_steps": 2}
        return dsframe.fit(task, file, resume="never").loss

    set_on_it = Line()
    vars(set_on_it)[name] = METHODS[name].__get__(set_on_it)
    losses = [trained(task) for task in (type("Line", (Line,), {name: METHODS[name]})(), set_on_it, Line())]
    assert losses[0] == losses[1] != losses[2]

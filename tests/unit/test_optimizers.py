"""One optimizer everywhere: what the file's section means, in torch and for DeepSpeed."""

import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsframe
from dsframe.checkpoint.changes import course_of, kind_of
from dsframe.config import load
from dsframe.data import Sampler
from dsframe.engines import optimizer_watch
from dsframe.engines.deepspeed import optimizer_trial
from dsframe.errors import ConfigError, EngineError, TaskError
from dsframe.model import optimizers
from tests.files import ds_config
from tests.lines import Line


def weight(*sizes):
    return nn.Parameter(torch.ones(sizes or 2))


def read(kind, params):
    return optimizers.read(load(ds_config(8, {"type": kind, "params": params})))


@pytest.mark.parametrize(
    ("kind", "params", "cls", "arguments"),
    [
        ("adam", {"lr": 0.1}, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0, "fused": True}),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0, "fused": True}),
        (
            "AdamW",
            {"adam_w_mode": False},
            torch.optim.AdamW,
            {"weight_decay": 0.0, "fused": True},
        ),  # as DeepSpeed has it
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {"fused": True}),  # with torch's decay
        ("AdamW", {"torch_adam": True, "foreach": True}, torch.optim.AdamW, {"foreach": True}),
    ],
)
def test_adam_is_decoupled_and_without_decay_where_the_file_is_silent(kind, params, cls, arguments):
    spec = read(kind, params)
    assert spec.cls is cls
    assert spec.arguments == arguments
    assert spec.for_deepspeed()["params"]["adam_w_mode"] == (cls is torch.optim.AdamW)


KINDS = ("AdamW", "SGD", "adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "Adadelta", "Adafactor")


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_of_torch_makes_its_update_from_its_own_rate(kind):
    spec = read(kind, {})
    assert spec.learning_rate == spec.build([weight()]).param_groups[0]["lr"]
    optimizers.try_out(spec, torch.device("cpu"))


def test_the_rate_of_muon_is_that_of_its_faster_half():
    assert read("Muon", {}).learning_rate == 0.02  # and 3e-4 for the other
    assert read("Muon", {"lr": 0.1}).learning_rate == 0.1
    assert read("Muon", {"lr": 0.1, "muon_lr": 0.0, "adam_lr": 0.2}).learning_rate == 0.2


@pytest.mark.parametrize("params", [{"torch_adam": False}, {"bias_correction": False}])
def test_deepspeeds_own_op_on_request_and_where_torchs_will_not_do(params):
    section = {"type": "AdamW", "params": {"lr": 0.1, **params}, "legacy_fusion": True}
    spec = optimizers.read(load(ds_config(8, section)))
    assert spec.cls is None
    assert spec.for_deepspeed() == section
    with pytest.raises(EngineError, match="exists in DeepSpeed only"):
        spec.build([])


@pytest.mark.parametrize(("kind", "decoupled"), [("Adam", True), ("Adam", False), ("AdamW", True)])
def test_a_checkpoint_of_torchs_adam_is_one_of_deepspeeds(kind, decoupled):
    """By its name in the manifest, which has to stay."""
    mode = {} if decoupled else {"adam_w_mode": False}
    names = {kind_of(read(kind, {**mode, **more})) for more in ({}, {"torch_adam": False})}
    assert names == {"adamw" if decoupled else "adam"}
    assert course_of(read(kind, mode)) == {"weight_decay": 0.0}, "whose kernels compute is no other training"


def test_an_argument_without_effect_on_the_training_is_left_to_deepspeeds_own():
    read("AdamW", {"set_grad_none": True}).build([weight()])


def test_a_beta_of_0_is_a_number_as_any_other():
    """GANs write [0.0, 0.9]; a file's reader makes 0 of it, and torch takes floats alone."""
    (group,) = read("Adam", {"betas": [0, 0.9]}).build([weight()]).param_groups
    assert group["betas"] == (0.0, 0.9)


def test_what_torch_refuses_is_a_mistake_of_the_file():
    with pytest.raises(ConfigError, match=r"optimizer\.params"):
        read("SGD", {"lr": -1.0}).build([weight()])


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (
            "AdamW",
            {"torch_adam": True, "capturable": True},
            "AdamW: If capturable=True, params and state_steps must be",
        ),
        ("NAdam", {"foreach": True, "differentiable": True}, "NAdam: _foreach ops don't support autograd"),
        ("AdamW", {"torch_adam": True, "foreach": True, "fused": True}, "fused: not possible with foreach"),
    ],
)
def test_what_torch_refuses_at_the_first_update(kind, params, message):
    with pytest.raises(ConfigError, match=message):
        optimizers.try_out(read(kind, params), torch.device("cpu"))


class Signs(torch.optim.Optimizer):
    """Steps of one size in the direction of a moving average."""

    def __init__(self, params, lr, decay=0.5):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["decay"])
                parameter.sub_(group["lr"] * average.sign())


class Ramp(Line):
    inputs, rows = 3, 32


def of_task(made):
    return optimizers.OptimizerSpec("task", made, {"lr": 0.1})


def own(steps, name="Signs", **params):
    return ds_config(8, {"type": f"{__name__}:{name}", "params": params}, engine="single", steps=steps)


def test_optimizers_of_models_that_the_task_does_not_have_are_refused(here):
    file = ds_config(8, "SGD", 0.1, engine="single", steps=1, optimizers={"critic": {"type": "SGD"}})
    with pytest.raises(TaskError, match=r"dsframe.optimizers: Line has no models\(\), so there are none to name"):
        dsframe.fit(Line(), file)


def test_an_optimizer_of_ones_own_trains_and_goes_on(here):
    whole = dsframe.fit(Ramp(), own(8, lr=0.01, decay=0.9))
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer, data, order = Signs(model.parameters(), 0.01, 0.9), Ramp().train_data(), Sampler(32, 8, 0)
    for step in range(8):
        inputs, targets = data.batch(order.global_batch(step)[0][1], 0)
        optimizer.zero_grad()
        loss = Ramp().loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert whole.loss == loss.item()
    shutil.rmtree("runs")
    dsframe.fit(Ramp(), own(5, lr=0.01, decay=0.9))
    assert dsframe.fit(Ramp(), own(8, lr=0.01, decay=0.9), resume="auto").loss == whole.loss


class Langevin(torch.optim.SGD):
    """Follows noise as well."""

    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            weight.grad.add_(torch.randn_like(weight))
        return super().step(closure)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_that_draws_is_for_one_process(ranks, monkeypatch):
    drawn = weight()
    drawn.grad = torch.zeros(2)
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    made = optimizer_watch.build(optimizers.read(load(own(1, "Langevin", lr=0.1))), [drawn])
    with pytest.raises(TaskError, match=r"Langevin draws random .* train on one") if ranks > 1 else nullcontext():
        made.step()


class Factory(Ramp):
    """A task that makes its optimizer, or something else."""

    def __init__(self, made=Signs):
        self.made = made

    def optimizer(self, groups, **params):
        return self.made(groups, **params)


def test_an_optimizer_that_the_task_makes(here):
    """The training of the same class by its name; tests/engines/test_parts.py has the other engines."""
    wanted = dsframe.fit(Ramp(), own(5, lr=0.01, decay=0.9)).loss
    made = {**own(5, lr=0.01, decay=0.9), "optimizer": {"type": "task", "params": {"lr": 0.01, "decay": 0.9}}}
    made["dsframe"]["run_dir"] = "made"
    assert dsframe.fit(Factory(), made).loss == wanted
    with pytest.raises(TaskError, match=r"Ramp has no optimizer\(groups, \*\*params\); define it"):
        dsframe.fit(Ramp(), made)
    with pytest.raises(TaskError, match=r"Task\.optimizer returned list; return a torch.optim.Optimizer"):
        dsframe.fit(Factory(lambda groups, **_: groups), made)
    with pytest.raises(ConfigError, match=r'optimizer\.params: "lr" is required'):
        load({**made, "optimizer": {"type": "task"}})


def by_shape(groups, lr):
    """Rates of its own, by shape."""
    matrices, rest = ([p for p in groups if (p.dim() > 1) is matrix] for matrix in (True, False))
    return torch.optim.SGD([{"params": matrices, "lr": 0.5 * lr}, {"params": rest}], lr=lr)


def test_rates_of_groups_that_the_task_makes_are_kept(here):
    file = {**own(5), "optimizer": {"type": "task", "params": {"lr": 0.1}}}
    found = dsframe.fit(Factory(by_shape), file).loss
    file = {**own(5), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    file["dsframe"] |= {"parameter_groups": [{"match": ["weight"], "lr_scale": 0.5}], "run_dir": "named"}
    assert found == dsframe.fit(Ramp(), file).loss


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda groups, **params: Signs(groups[:1], **params),
            "has 1 of the 2 tensors that it was given, and 0 others",
        ),
        (
            lambda groups, **params: Signs([nn.Parameter(g.detach()) for g in groups], **params),
            "0 of the 2 .* 2 others",
        ),
        (lambda groups, **params: torch.optim.Optimizer.__new__(Signs), "and call its __init__"),
    ],
)
def test_an_optimizer_over_other_tensors_is_refused(made, message):
    spec = of_task(made)
    with pytest.raises(TaskError, match=message):
        spec.build([weight(), weight(3)])


class ByNorm(Signs):
    """Steps of a length, as LARS takes them: each tensor's numbers depend on each other."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        (Signs, ()),
        (ByNorm, (1, 3)),
        (by_shape, (3,)),
    ],
)
def test_an_optimizer_that_shards_would_change_is_refused(made, refused):
    spec = of_task(made)
    for stage in (1, 3):
        said = pytest.raises(EngineError, match=f"its update of a number depends on others.*ZeRO-{stage}")
        with said if stage in refused else nullcontext():
            optimizer_trial.refuse_dependent(spec, stage)


class TwoSteps(Signs):
    """As sharpness-aware minimisation is often written: the loss is computed again between two steps."""

    def step(self, closure=None):
        raise NotImplementedError


class Closure(Signs):
    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "needs a closure"
        with torch.enable_grad():
            closure()


class ScheduleFree(Signs):
    def train(self): ...

    def eval(self): ...


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (torch.optim.LBFGS, "LBFGS computes the loss again in its step"),
        (Closure, "Closure computes the loss again in its step"),
        (TwoSteps, "TwoSteps computes the loss again in its step"),
        (ScheduleFree, "ScheduleFree has other weights for evaluations"),
    ],
)
def test_an_optimizer_that_needs_more_than_a_step_is_refused(made, message):
    spec = of_task(made)
    with pytest.raises(TaskError, match=message):
        optimizer_watch.build(spec, [weight()])


class Around(torch.optim.Optimizer):
    """Has the groups of the optimizer inside, with a weight decay, as wrappers do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()


def test_a_decay_of_the_optimizer_inside_is_its_own():
    spec = of_task(Around)
    optimizer_watch.build(spec, [weight()])
    with pytest.raises(ConfigError, match="Around has no weight_decay"):
        optimizer_watch.build(spec, [{"params": [weight()], "weight_decay": 0.1}])


class Factored(Signs):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = parameter.grad.mean(-1, keepdim=True)


@pytest.mark.parametrize("shards", [False, True])
def test_state_of_another_shape_needs_whole_weights(shards):
    spec = of_task(Factored)
    matrix = weight(2, 3)
    matrix.grad = torch.ones(2, 3)
    optimizer = optimizer_watch.build(spec, [matrix], shards=shards)
    with pytest.raises(TaskError, match=r"rows'\] of shape \[2, 1\] about \[2, 3\]") if shards else nullcontext():
        optimizer.step()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (own(1, "Sings", lr=0.1), "Sings' cannot be imported: .*has no attribute 'Sings'"),
        (own(1, "Ramp", lr=0.1), "Ramp' is not a subclass of torch.optim.Optimizer"),
        (own(1, lr=0.1, dekay=1), "unexpected keyword argument 'dekay'"),
    ],
)
def test_an_optimizer_of_ones_own_that_there_is_not(document, message, tmp_path):
    document["dsframe"]["run_dir"] = str(tmp_path)
    with pytest.raises(ConfigError, match=message):
        optimizers.read(load(document)).build([weight(1)])


class Idle(Line):
    """With a layer that no step uses."""

    def model(self):
        net = super().model()
        net.idle = nn.Linear(1, 1)
        return net


@pytest.mark.parametrize(
    ("params", "moves"),
    [({"momentum": 0.9}, False), ({"weight_decay": 0.1}, True), ({}, False)],
)
def test_a_gradient_that_torch_would_skip_is_said_once(params, moves, here, capsys):
    optimizer = {"type": "SGD", "params": {"lr": 0.1, **params}}
    dsframe.fit(Idle(), ds_config(8, optimizer, engine="single", steps=3))
    line = "note: up to step 1 some losses do not use idle.bias, idle.weight: the gradient counts as 0 on every engine"
    said = capsys.readouterr().err
    assert said.count(line) == said.count("some losses do not use") == moves
    dsframe.fit(Line(), ds_config(8, optimizer, engine="single", steps=1, run_dir="all"))
    assert "some losses do not use" not in capsys.readouterr().err

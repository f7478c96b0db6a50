"""Where a model is cut into stages, and what is said of one that cannot be. No process is started for it."""

import contextlib
import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from dsframe import Task, Tied
from dsframe.config import load
from dsframe.engines.deepspeed import pipeline
from dsframe.engines.deepspeed.imports import PipelineModule
from dsframe.engines.deepspeed.missing_parts import MissingParts
from dsframe.engines.deepspeed.pipeline import PipelineEngine
from dsframe.engines.deepspeed.stages import Cut, Stage
from dsframe.errors import EngineError, TaskError
from dsframe.model.micro_batch import MicroBatch


class Given(Task):
    """A task with this model, or these layers."""

    def __init__(self, model=None, layers=None):
        self._model, self._layers = model, layers

    def layers(self):
        return self._layers

    def model(self):
        return self._model or super().model()


class OfLayers(Task):
    """A task with these layers alone."""

    def __init__(self, layers):
        self.layers = lambda: layers


def cut(task, sections=None, **pipeline):
    config = load({"train_batch_size": 8, "pipeline": {"stages": 2, **pipeline}, **(sections or {})})
    return Cut(SimpleNamespace(config=config, task=task, seed=0, device=torch.device("cpu"), directory=Path()))


class Own(nn.Sequential):
    """More than its modules one after another."""

    def forward(self, inputs):
        return super().forward(inputs) + inputs


class Looks(nn.Linear):
    """An initialisation that needs numbers: it cannot be made without memory."""

    def __init__(self):
        super().__init__(3, 3)
        assert float(self.weight.detach().sum()) != 0


class Frozen(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


def with_hook(layer):
    layer.weight.register_hook(lambda gradient: gradient)
    return layer


LINEAR = partial(nn.Linear, 3, 3)
TWICE = nn.Sequential(*[nn.Linear(3, 3), nn.ReLU()] * 2)
EMBEDDED = [partial(nn.Embedding, 9, 3), LINEAR, partial(nn.Linear, 3, 3), Tied(0, functional.linear)]


@pytest.mark.parametrize(
    ("task", "pipeline", "bounds", "sizes"),
    [
        (Given(nn.Sequential(*[nn.Linear(3, 3), nn.ReLU()] * 2, nn.Linear(3, 9))), {}, [0, 4, 5], [12, 0, 12, 0, 36]),
        (Given(layers=EMBEDDED), {}, [0, 2, 4], [27, 12, 12, 27]),
        (Given(layers=EMBEDDED), {"partition": "uniform", "stages": 4}, [0, 1, 2, 3, 4], [27, 12, 12, 27]),
        (Given(layers=[LINEAR, LINEAR, nn.ReLU, Looks]), {"partition": "type:looks|lin"}, [0, 3, 4], [12, 12, 0, 12]),
    ],
)
def test_stages_hold_about_the_same(task, pipeline, bounds, sizes):
    found = cut(task, **pipeline)
    assert found.sizes == sizes
    assert found.bounds == bounds


@pytest.mark.parametrize(
    ("task", "pipeline", "kind", "message"),
    [
        (Given(nn.Linear(3, 3)), {}, TaskError, r"Linear of Given is one piece; give its layers: layers\(\), or .*cut\(model\)"),
        (Given(Own(nn.Linear(3, 3), nn.ReLU())), {}, TaskError, "Own of Given is one piece"),
        (Given(layers=[LINEAR, LINEAR]), {"stages": 4}, EngineError, "4 stages, but the model has 2 layers; use fewer"),
        (Given(layers=[LINEAR, LINEAR]), {"partition": "type:conv"}, EngineError, 'conv" matches 0 .*classes are Linear'),
        (Given(layers=EMBEDDED[:3]), {"partition": "type:embed"}, EngineError, 'embed" matches 1 layers, too few for 2'),
        (Given(layers=[partial(nn.Embedding, 9, 3, max_norm=1.0), LINEAR]), {}, EngineError, "cannot keep .* max_norm"),
        (Given(nn.Sequential(with_hook(LINEAR()), LINEAR())), {}, EngineError, "no hooks on gradients, and 0.weight has one"),
        (Given(layers=[LINEAR, nn.ReLU]), {}, EngineError, "stage 1 of 2 would have layers 1 to 1 and nothing to train"),
        (Given(TWICE), {"partition": "uniform"}, TaskError, "layer 2, Linear, shares a weight with .*; .*dsframe.Tied"),
        (Given(layers=[LINEAR, Tied(0, functional.linear)]), {}, TaskError, "are weight, bias; make what is shared a layer"),
    ],
)  # fmt: skip
def test_what_makes_no_stages_is_said(task, pipeline, kind, message):
    with pytest.raises(kind, match=message):
        cut(task, **pipeline)


@pytest.mark.parametrize(
    ("task", "found"),
    [
        (Given(layers=[LINEAR, LINEAR, partial(nn.BatchNorm1d, 3)]), True),
        (Given(nn.Sequential(LINEAR(), LINEAR(), nn.BatchNorm1d(3)).eval()), True),  # training will change its mode
        (Given(layers=[LINEAR, LINEAR, partial(Frozen, 3)]), False),
    ],
)
def test_every_rank_knows_of_batchnorm_in_the_last_stage(task, found):
    """The first stage's rank announces it."""
    assert bool(cut(task).depends) == found
    assert not task.batch_dependent


def hooked(register):
    model = nn.Sequential(LINEAR(), nn.Tanh(), LINEAR())
    getattr(model, register)(lambda *_: None)
    return model


class Fixed(nn.Sequential):
    """Its dropout stays as in evaluation."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


class Drawn(Fixed):
    """Its dropout draws in evaluations, too."""

    def train(self, mode=True):
        super().train(mode)
        self[1].train()
        return self


class OfParts(Task):
    """A network that is cut into its first and its last part."""

    def __init__(self, **parts):
        self.parts = parts

    def model(self):
        model = nn.Module()
        for name, part in {"first": LINEAR(), "last": LINEAR(), **self.parts}.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                model.register_buffer(name, part)
            else:
                setattr(model, name, part)
        return model

    def cut(self, model):
        return [model.first, model.last]


class Initialised(OfLayers):
    """Its model is that of its layers, with other weights."""

    def model(self):
        return super().model().apply(lambda module: None)


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        *[(Given(hooked(f"register_{kind}_hook")), r"^Sequential has a hook .*; put it into a layer")
          for kind in ("forward", "full_backward_pre")],
        (Given(Fixed(LINEAR(), nn.Dropout(), LINEAR())), r"^Fixed\.train\(\) leaves Dropout in another mode than the layers' own"),
        (Given(Drawn(LINEAR(), nn.Dropout(), LINEAR())), r"^Drawn\.eval\(\) leaves Dropout in another mode"),
        (OfParts(scale=nn.Parameter(ONES)), "^scale of Module is in none of its layers, so no stage has it; put"),
        (OfParts(middle=LINEAR()), r"^middle\.weight, middle\.bias of Module is in none"),
        (OfParts(seen=ONES), "^seen of Module is in none"),
        (OfParts(unused=nn.Dropout()), None),
        (Given(nn.Linear(3, 3), [LINEAR, LINEAR]), r"^Given has layers\(\) and a model\(\) of its own; .*; leave one of them out"),
        (Initialised([LINEAR, LINEAR]), r"^Initialised has layers\(\) and a model\(\) of its own"),
    ],
)  # fmt: skip
def test_what_a_model_does_besides_its_layers_is_refused(task, message):
    """Stages left it out without a word."""
    with pytest.raises(TaskError, match=message) if message else contextlib.nullcontext():
        cut(task)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3, affine=False), nn.InstanceNorm1d(3, track_running_stats=True)])
def test_running_statistics_in_two_stages_are_refused(norm):
    """Each stage would have its own; within a stage, and where they do not change, they may be used twice."""
    with pytest.raises(
        TaskError, match=r"layer 3, .*Norm1d, shares running statistics .*; give it a .*Norm1d of its own"
    ):
        cut(Given(nn.Sequential(LINEAR(), norm, LINEAR(), norm)), partition="uniform")
    cut(Given(nn.Sequential(LINEAR(), norm, norm, LINEAR())), partition="type:linear")
    fixed = Frozen(3, affine=False)
    cut(Given(nn.Sequential(LINEAR(), fixed, LINEAR(), fixed)), partition="uniform")


class Chain(nn.Module):
    """An activation between two layers, and dropout, which an evaluation leaves out."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, inputs):
        return self.last(functional.dropout(self.first(inputs).relu(), 0.5, self.training))


class Chained(Task):
    """Cut with these modules in between."""

    def __init__(self, *between):
        self.between = between

    def model(self):
        return Chain()

    def cut(self, model):
        return [model.first, *self.between, model.last]


def test_a_cut_that_forgets_an_activation_is_refused_with_the_first_batch():
    rows = torch.randn(4, 3)
    engine = object.__new__(PipelineEngine)
    engine._cut = cut(Chained())
    with pytest.raises(
        TaskError, match=r"^the layers of Chain, one after the other, compute something else than it does itself"
    ):
        engine._micro_batch(MicroBatch(rows, None))
    right = cut(Chained(nn.ReLU(), nn.Dropout()))
    assert right._trial is not None
    before = torch.get_rng_state()
    right.try_out(rows)
    assert torch.equal(torch.get_rng_state(), before)
    assert right._trial is None, "once"
    engine._cut, engine._dtype = right, torch.float32
    assert engine._micro_batch(MicroBatch((rows,), None))[0] is rows
    assert all(module.training for model in right.models for module in model.modules())


class Noise(nn.Module):
    def forward(self, inputs):
        return inputs + torch.rand_like(inputs)


class NoisyChain(nn.Sequential):
    """More than a chain, by its class alone."""

    def forward(self, inputs):
        return super().forward(inputs)


class Noisy(Task):
    def model(self):
        return NoisyChain(Noise(), nn.Linear(3, 3), nn.Linear(3, 3))

    def cut(self, model):
        return list(model)


def test_a_cut_that_draws_in_evaluations_is_compared_with_the_same_numbers():
    cut(Noisy()).try_out(torch.randn(4, 3))


class Whole(nn.Module):
    """A model that is more than its layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.criterion, self.weighted = nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(torch.ones(3))
        self.register_buffer("weights", torch.ones(3))
        self.classes, self.extra = 3, 0.0


def _first(model):
    return model.body[0]


@pytest.mark.parametrize(
    "used",
    [
        lambda model: list(model.parameters()),
        lambda model: model.weights,
        lambda model: model.extra,
        lambda model: getattr(model, "made_by_forward", None),
        lambda model: model.weighted(torch.ones(1, 3), torch.ones(1, dtype=torch.long)),
        lambda model: _first(model)(torch.ones(2, 3)),
        lambda model: _first(model).weight,
        lambda model: setattr(_first(model), "factor", 2),
    ],
)
def test_a_loss_that_uses_what_another_stage_has_is_refused(used):
    model = Whole()
    weight, others = model.body[0].weight, MissingParts()
    others.add(model, nn.Sequential(model.body[2]), nn.Sequential(*model.body))
    assert not [name for name, _ in model.named_parameters() if not name.startswith("body.2")]
    pattern = "pipeline's loss and metrics have only .* the task uses .*: return what it needs from the layers"
    with others.refused():
        with others.refused():  # as metrics around a loss
            pass
        with pytest.raises(TaskError, match=pattern):
            used(model)
        with pytest.raises(TaskError, match=r"uses a weight of another stage"):  # the task may hold it by itself
            weight.square()
        assert model.body[-1].weight.square().sum() > 0
        assert model.criterion(torch.ones(1, 3), torch.ones(1, dtype=torch.long)) > 0
        assert model.classes == 3
    assert type(model) is Whole
    assert type(weight) is nn.Parameter
    assert [type(module) for module in copy.deepcopy(model).body] == [nn.Linear, nn.BatchNorm1d, nn.Linear]


@pytest.mark.parametrize(
    ("outputs", "what"),
    [
        ([torch.ones(2)], "list"),
        ((torch.ones(2), None), "NoneType in a tuple"),
        (torch.ones(2, dtype=torch.complex64), r"complex numbers \(torch.complex64\)"),
        (torch.max(torch.ones(2, 2), 0), "max"),
        ((), "nothing in a tuple"),
    ],
)
def test_what_is_not_sent_between_stages_is_named(outputs, what):
    stage = SimpleNamespace(parts=[0, 2, 4], stage_id=0)
    with pytest.raises(TaskError, match=f"layer 1, .* returns {what}.*: pass a tensor or a tuple of tensors"):
        Stage._refuse_unsendable(stage, outputs)


def running(monkeypatch, function):
    """A first stage of two, in training, that computes ``function``."""
    stage = object.__new__(Stage)
    nn.Module.__init__(stage)
    monkeypatch.setattr(Stage, "is_last", False)
    monkeypatch.setattr(PipelineModule, "forward", lambda self, inputs: function(inputs))
    stage.parts, stage.stage_id, stage._sizes = [0, 2, 4], 0, {}
    return stage


def test_every_input_of_a_stage_has_a_gradient_and_every_output_can_be_sent(monkeypatch):
    """DeepSpeed exchanges one for each tensor of floating-point numbers. What is not used may hold NaN."""

    def function(inputs):
        used, *_ = inputs
        return (2 * used).t(), used.detach().sum(), torch.ones(2, dtype=torch.int64)

    stage = running(monkeypatch, function)
    used, unused = torch.ones(2, 3, requires_grad=True), torch.full((3,), torch.nan, requires_grad=True)
    turned, total, number = stage((used, unused))
    assert [part.requires_grad for part in (turned, total, number)] == [True, True, False]
    assert turned.is_contiguous()
    assert torch.equal(turned, torch.full((3, 2), 2.0))
    (turned.sum() + total).backward()
    assert (used.grad.tolist(), unused.grad.tolist()) == ([[2.0] * 3] * 2, [0.0] * 3)
    stage.eval()
    assert [part.requires_grad for part in stage((used, unused))] == [True, False, False]


def test_an_input_s_size_decides_that_of_the_outputs(monkeypatch):
    lengths = iter([2, 3, 2, 4])
    stage = running(monkeypatch, lambda inputs: torch.ones(len(inputs), next(lengths)))
    stage(torch.ones(1))
    stage(torch.ones(2))
    stage(torch.ones(1))
    with pytest.raises(TaskError, match=r"outputs of shapes \[torch.Size\(\[1, 2\]\)\] before, and now .*1, 4"):
        stage(torch.ones(1))


def test_stages_announce_sizes_where_a_step_has_several(monkeypatch):
    asked = []
    monkeypatch.setattr(pipeline.patches, "announce_sizes", lambda engine, **how: asked.append(how))
    engine = object.__new__(PipelineEngine)
    engine._engine, engine._sizes = None, set()
    short, long = torch.Size([2, 8]), torch.Size([2, 9])
    for sizes in ({short}, {short}, {long}, {short, long}, {short, long}, {long}):
        engine._settle_sizes(sizes)
    assert [how["each"] for how in asked] == [False, False, False, True, True, False]
    assert [how["reset"] for how in asked] == [True, False, True, True, False, True]  # the sizes of the step before


@pytest.mark.parametrize(
    ("local", "names", "borrowed"),
    [
        (range(2), ["0.weight", "1.weight", "1.bias"], set()),
        (range(2, 4), ["2.weight", "2.bias", "0.weight"], {"0.weight"}),
    ],
)
def test_a_tied_weight_has_its_owners_name_and_one_owner(local, names, borrowed):
    """A stage that only uses it saves nothing of it."""
    probes = nn.Sequential(nn.Embedding(9, 3), LINEAR(), LINEAR(), nn.Identity())
    stage = object.__new__(Stage)
    nn.Module.__init__(stage)
    stage.tied_modules = nn.ModuleDict({"0": probes[0]})
    for index in local:
        stage.add_module(str(index), probes[index])
    stage.name(None, EMBEDDED, local, probes)
    assert [name for name, _ in stage.model.named_parameters()] == names
    assert stage.borrowed == borrowed
    assert stage.further_names == {"3.weight": "0.weight"}


def test_groups_of_a_cut_model_are_named_as_it_names_its_weights():
    settings = {"parameter_groups": [{"match": ["first.*"], "freeze": True}]}
    (whole, _) = cut(Chained(nn.ReLU(), nn.Linear(3, 3)), {"dsframe": settings}).models
    frozen = [name for name, weight in whole.named_parameters() if not weight.requires_grad]
    assert frozen == ["first.weight", "first.bias"]

"""Parameter groups: which parameter is in which, what is refused, and what a run says of them."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dsframe
from dsframe.config import load
from dsframe.data import TensorSource
from dsframe.engines.deepspeed.stages import Cut
from dsframe.errors import ConfigError, TaskError
from dsframe.model import groups
from tests.unit.test_task_huggingface import LLAMA

FILE = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
}


class Net(nn.Module):
    """Its output layer is the embedding, by a further name."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.norm = nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.body(self.embed(tokens))))


class Tokens(dsframe.Task):
    """With groups of its own, where it is given some."""

    def __init__(self, given=()):
        self.given = given

    def model(self):
        return Net()

    def parameter_groups(self, model):
        return self.given

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    def train_data(self):
        tokens = torch.arange(16) % 8
        return TensorSource(tokens, tokens.flip(0))


def settled(*wanted, task=None, **more):
    config = load(FILE | {"dsframe": {"parameter_groups": list(wanted), **more}})
    return groups.settle_groups(config, task or Tokens(), Net())


def test_patterns_choose_parameters_by_any_of_their_names():
    found = settled({"match": ["head.*"], "lr_scale": 10}, {"match": ["body.bias", "norm*"], "weight_decay": 0})
    assert found.options == {
        "embed.weight": {"lr_scale": 10.0},
        **{name: {"weight_decay": 0.0} for name in ("body.bias", "norm.weight", "norm.bias")},
    }
    model = Net()
    embed, body, head, norm = model.embed.weight, model.body.weight, model.body.bias, model.norm.weight
    assert found.split(
        [("embed.weight", embed), ("body.weight", body), ("body.bias", head), ("norm.weight", norm)]
    ) == [
        {"params": [embed], "lr_scale": 10.0},
        {"params": [body]},
        {"params": [head, norm], "weight_decay": 0.0},
    ]


def test_a_module_that_is_trained_again_is_frozen_anew():
    """As in a program that trains the head first, and everything after it. What the model froze itself stays."""
    model = Net()
    model.norm.bias.requires_grad_(False)
    wanted = {"parameter_groups": [{"match": ["embed*", "norm.*"], "freeze": True}]}
    groups.settle_groups(load(FILE | {"dsframe": wanted}), Tokens(), model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["body.weight", "body.bias"]
    groups.settle_groups(load(FILE), Tokens(), model)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["norm.bias"]


def test_the_preset_goes_along_with_groups_whose_own_decay_comes_first():
    found = settled(
        {"match": ["body.*"], "lr_scale": 2}, {"match": ["norm.bias"], "weight_decay": 0.3}, no_decay="norms-and-biases"
    )
    assert found.options == {
        "body.weight": {"lr_scale": 2.0},
        "body.bias": {"lr_scale": 2.0, "weight_decay": 0.0},
        "norm.weight": {"weight_decay": 0.0},
        "norm.bias": {"weight_decay": 0.3},
    }


BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize("kind", ["llama", "bert", "vit", "gpt2"])
def test_the_preset_is_the_trainers_rule(kind):
    from transformers import AutoConfig, AutoModel, Trainer

    small = {"n_embd": 16, "n_layer": 2, "n_head": 2} if kind == "gpt2" else LLAMA if kind == "llama" else BERT
    model = AutoModel.from_config(AutoConfig.for_model(**{**small, "model_type": kind}))
    decayed = Trainer.get_decay_parameter_names(None, model)
    names = [name for name, _ in model.named_parameters()]
    assert set(groups.without_decay(model)) == set(names) - set(decayed) != set()


def test_the_preset_goes_by_whole_names_of_modules_in_any_case():
    model = nn.ModuleDict({"a": nn.LayerNorm(2), "ab": nn.Linear(2, 2), "RMSNorm": nn.Linear(2, 2, bias=False)})
    assert groups.without_decay(model) == ["a.weight", "a.bias", "ab.bias", "RMSNorm.weight"]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ([{"match": ["haed.*"], "lr_scale": 2}], r'parameter_groups\[0\]: "haed\.\*" matches no parameter.*mean "head\.\*"\?'),
        (
            [{"match": ["*.bias"], "weight_decay": 0}, {"match": ["body.*"], "lr_scale": 2}],
            r'parameter_groups\[1\]: "body\.\*" matches body\.bias, and so does "\*\.bias" of group 0',
        ),
        (
            [{"match": ["embed.*"], "weight_decay": 0}, {"match": ["head.*"], "lr_scale": 2}],
            r'"head\.\*" matches head\.weight, and so does "embed\.\*" of group 0',
        ),
        (
            [{"match": ["[bn]*"], "freeze": True}, {"match": ["embed.*"], "freeze": True}],
            r"parameter_groups\[1\]: with it all parameters are frozen",
        ),
        ([{"match": ["*"]}], r"parameter_groups\[0\]: changes nothing"),
        ([{"match": ["*"], "freeze": True, "lr_scale": 2}], "lr_scale has no effect on frozen parameters"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_task", [False, True])
def test_what_is_wrong_is_said_before_training(wanted, says, by_task):
    with pytest.raises(TaskError if by_task else ConfigError, match=says):
        settled(task=Tokens(wanted)) if by_task else settled(*wanted)


def test_groups_of_file_and_task_are_refused():
    group = {"match": ["body.*"], "lr_scale": 2}
    with pytest.raises(TaskError, match='the file has "parameter_groups" too'):
        settled(group, task=Tokens([group]))


def test_groups_as_torch_has_them_are_told_of_patterns():
    with pytest.raises(
        TaskError, match=r'groups: match: Field required, params: .*; name parameters by patterns.*"head\.\*"'
    ):
        settled(task=Tokens([{"params": [], "lr_scale": 2}]))


def test_an_engine_that_does_not_know_groups_refuses_them(monkeypatch):
    from dsframe import engines
    from dsframe.engines.table import TABLE, Entry

    config = load(FILE | {"dsframe": {"no_decay": "norms-and-biases"}})
    assert not engines.examine(config, "single")[0]
    monkeypatch.setattr(engines, "TABLE", {**TABLE, "vendor-engine": Entry("vendor:Engine")})
    (problem,) = engines.examine(config, "vendor-engine")[0]
    assert problem.path == "dsframe.no_decay"


# In a pipeline every stage knows all names.


class Layered(Tokens):
    model = dsframe.Task.model

    def layers(self):
        return LAYERS


def cut(*wanted, **more):
    task = Layered()
    settings = {"parameter_groups": list(wanted), **more}
    config = load({**FILE, "pipeline": {"stages": 2}, "dsframe": settings})
    plan = SimpleNamespace(config=config, task=task, seed=0, device=torch.device("cpu"), directory=Path())
    return Cut(plan)


LAYERS = [
    partial(nn.Embedding, 8, 4),
    partial(nn.Linear, 4, 4),
    partial(nn.LayerNorm, 4),
    dsframe.Tied(0, nn.functional.linear),
]


def test_layers_are_known_by_the_names_of_the_state():
    found = cut({"match": ["3.weight"], "lr_scale": 2}, no_decay="norms-and-biases")
    none = {"weight_decay": 0.0}
    assert found.groups.options == {"0.weight": {"lr_scale": 2.0}, "1.bias": none, "2.weight": none, "2.bias": none}
    assert found.groups.lines[0] == "lr_scale 2: 1 parameter, 32 elements"
    with pytest.raises(ConfigError, match=r'"4\.weight" matches no parameter of the model'):
        cut({"match": ["4.weight"], "lr_scale": 2})
    assert cut({"match": ["3.weight"], "freeze": True}).sizes == [0, 20, 8, 0], "what is frozen balances nothing"


# In a run.


def test_a_run_says_its_groups_and_a_change_of_them(here, capsys):

    def run(resume, steps, **more):
        dsframe.fit(
            Tokens(), FILE | {"dsframe": {"engine": "single", "steps": steps, "run_dir": "run", **more}}, resume=resume
        )
        return capsys.readouterr().err

    first = [{"match": ["embed.*"], "freeze": True}]
    said = run("never", 2, parameter_groups=first)
    assert "dsframe: parameter group: frozen: 1 parameter, 32 elements\n" in said
    assert "dsframe: parameter group: as the optimizer says: 4 parameters, 28 elements\n" in said
    assert "change" not in run("auto", 3, parameter_groups=first)
    said = run("auto", 4, no_decay="norms-and-biases")
    assert (
        'with a change: parameter_groups was [{"freeze": true, "match": ["embed.*"]}], is []: the next update' in said
    )
    assert 'with a change: no_decay was null, is "norms-and-biases": the next' in said
    assert 'with a change: no_decay was "norms-and-biases", is null: the next update' in run("auto", 5)

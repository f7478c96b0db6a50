"""Defaults that a file inherits: the right ones, said before training, and torch's on request, on every engine."""

import inspect

import pytest
import torch
from torch import nn

import dsframe
from dsframe.config import load
from dsframe.config.resolve import inherit
from dsframe.model import optimizers
from tests.files import ds_config
from tests.lines import Line


def file(kind="Adam", inherits=None, **params):
    settings = {"engine": "single", "steps": 3, "checkpoints": {"at_end": False}}
    return ds_config(4, {"type": kind, "params": params}, **(settings | ({"inherit": inherits} if inherits else {})))


def found(document):
    return {str(one.path[-1]): one.value for one in load(document).inherited}


def test_deepspeeds_defaults_are_deepspeeds():
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime import config, constants

    says = found(file("Adam"))
    arguments = inspect.signature(FusedAdam.__init__).parameters
    for key in ("lr", "betas", "eps", "weight_decay", "bias_correction"):
        expected = arguments[key].default
        assert says[key] == (list(expected) if isinstance(expected, tuple) else expected), key
    assert says["adam_w_mode"] is config.ADAM_W_MODE_DEFAULT
    assert says["gradient_clipping"] == constants.GRADIENT_CLIPPING_DEFAULT
    assert says["weight_decay"] == optimizers.read(load(file("AdamW"))).arguments["weight_decay"] == 0.0


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "RMSprop"])
def test_torchs_defaults_are_torchs(kind):
    cls = getattr(torch.optim, kind)
    spec = optimizers.read(load(file(kind, "torch")))
    assert spec.cls is cls
    made, usual = spec.build([nn.Parameter(torch.ones(2))]), cls([nn.Parameter(torch.ones(2))])
    differ = {key for key, value in usual.defaults.items() if made.defaults[key] != value}
    assert differ <= {"fused", "decoupled_weight_decay"}
    assert load(file(kind, "torch")).deepspeed.gradient_clipping == 0
    says = found(file(kind, "torch"))
    assert says.pop("gradient_clipping") == 0
    says = {key: tuple(value) if isinstance(value, list) else value for key, value in says.items()}
    assert says.pop("adam_w_mode", False) is False
    assert says.pop("bias_correction", True) is True
    assert says.items() <= usual.defaults.items()
    assert set(says) == {"lr", "momentum", "betas", "eps", "weight_decay"} & usual.defaults.keys()


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_deepspeed_is_handed_torchs(kind):
    handed = optimizers.read(load(file(kind, "torch"))).for_deepspeed()["params"]
    assert handed["adam_w_mode"] == (kind == "AdamW")
    assert handed["weight_decay"] == (0.01 if kind == "AdamW" else 0.0)
    assert load(file(kind, "torch")).for_deepspeed(1)["gradient_clipping"] == 0


def test_what_the_file_says_is_not_inherited():
    document = file("AdamW", None, lr=0.1, weight_decay=0.3, betas=[0.8, 0.9], eps=1e-6, bias_correction=True)
    assert inherit.sentence(load(document | {"gradient_clipping": 2.0}).inherited) == ""
    kept = load(document | {"dsframe": {"inherit": "torch"}})
    assert optimizers.read(kept).arguments["weight_decay"] == 0.3
    assert found(file("AdamW", None, torch_adam=True))["weight_decay"] == 0.01  # torch's own, as DeepSpeed makes it
    assert found({"train_batch_size": 4}) == {"gradient_clipping": 1.0}
    assert found(ds_config(4, "AdamW"))["weight_decay"] == 0.0


def test_it_is_said_at_the_start(here, capsys):
    dsframe.fit(Line(), file("Adam", lr=0.1))
    assert "dsframe: the file does not say, so inherited: gradient_clipping 1.0, betas" in capsys.readouterr().err

"""A model trains in the number format that it is made in, or there is an error; nothing is cast in silence."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe
from dsframe.config import load
from dsframe.data import TensorSource
from dsframe.errors import ConfigError, EngineError, TaskError
from dsframe.model import formats
from dsframe.model.formats import kept_in_fp32, own_dtype
from dsframe.tools.export import read
from tests import lines
from tests.files import ds_config

pytestmark = pytest.mark.usefixtures("here")


class Line(lines.Line):
    inputs, rows = 3, 32

    def __init__(self, dtype, given=None):
        self.dtype, self.given = dtype, given or dtype

    def model(self):
        return super().model().to(self.dtype)

    def loss(self, outputs, targets):
        assert outputs.dtype == self.dtype
        return super().loss(outputs, targets)

    def train_data(self):
        return TensorSource(*(numbers.to(self.given) for numbers in super().train_data()._data))


def file(steps):
    return ds_config(8, "AdamW", 0.01, engine="single", steps=steps)


def weights(folder):
    return dict(read(max((Path("runs") / folder / "checkpoints").glob("step-*")), "float64"))


def test_float64_trains_and_goes_on_in_float64():
    whole = dsframe.fit(Line(torch.float64), {**file(6), "dsframe": {**file(6)["dsframe"], "run_dir": "runs/whole"}})
    dsframe.fit(Line(torch.float64), file(3))
    parts = dsframe.fit(Line(torch.float64), file(6), resume="auto")
    assert parts.loss == whole.loss
    assert parts.loss != torch.tensor(parts.loss).item()  # not rounded to float32
    one, other = weights("whole"), weights("Line-single")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any((tensor != tensor.float()).any() for tensor in one.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_that_no_file_asks_for_are_an_error(dtype):
    with pytest.raises(TaskError, match=r"Line\.model is in b?float16, and the file names no number format; write"):
        dsframe.fit(Line(dtype), file(1))


def test_what_keeps_float32_refuses_float64():
    task, config = Line(torch.float64), load(file(1))
    with pytest.raises(EngineError, match="the model is in float64, and this engine keeps float32"):
        own_dtype(config, task, nn.Linear(2, 2).double(), keeps_float64=False)
    with pytest.raises(TaskError, match=r"Line\.models: 'teacher' is in bfloat16.*for all models"):
        own_dtype(config, task, nn.Linear(2, 2).bfloat16(), keeps_float64=True, part="teacher")
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(TaskError, match="is in float32, float64"):
        own_dtype(config, task, mixed, keeps_float64=True)
    assert own_dtype(load({**file(1), "bf16": {"enabled": True}}), task, mixed, keeps_float64=False) == torch.float32


def test_inputs_are_not_cast():
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        dsframe.fit(Line(torch.float32, torch.float64), file(1))


def test_what_transformers_keeps_in_fp32_is_named():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    assert kept_in_fp32(model, torch.float16) == ["wo"]
    assert kept_in_fp32(model, torch.bfloat16) == kept_in_fp32(model, torch.float32) == []
    model._keep_in_fp32_modules_strict = {"SelfAttention", "router"}
    assert kept_in_fp32(model, torch.bfloat16) == ["SelfAttention"]
    assert kept_in_fp32(model, torch.float16) == ["SelfAttention", "wo"]
    assert kept_in_fp32(nn.Linear(2, 2), torch.float16) == []


def test_names_that_stay_in_fp32_are_looked_for():
    engine, model = {"engine": "single", "steps": 1}, {"keep_in_fp32": ["*.wieght"]}
    asked = {**file(1), "bf16": {"enabled": True}, "dsframe": {**engine, "model": model}}
    with pytest.raises(
        ConfigError, match=r'"\*\.wieght" matches no parameter of the model; there are 2 parameters, such as weight'
    ):
        dsframe.fit(Line(torch.float32), asked)


@pytest.mark.parametrize(
    ("pattern", "layer"), [("*.bias", "0 is a Linear"), ("1.out_proj.*", "1 is a MultiheadAttention")]
)
def test_a_layer_of_torchs_is_not_kept_in_part(pattern, layer):
    asked = {**file(1), "bf16": {"enabled": True}, "dsframe": {"model": {"keep_in_fp32": [pattern]}}}
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    with pytest.raises(ConfigError, match=layer):
        formats.keep_in_fp32(load(asked), model)
    formats.keep_in_fp32(load({**asked, "dsframe": {"model": {"keep_in_fp32": ["1.*"]}}}), model)


def keeping(*patterns):
    return load({**file(1), "bf16": {"enabled": True}, "dsframe": {"model": {"keep_in_fp32": list(patterns)}}})


def test_a_kept_part_computes_in_fp32_and_gives_the_others_16_bits():
    """Its outermost module alone casts; a shared weight is kept by each of its names."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), inner, nn.Linear(2, 2).bfloat16())
    formats.keep_in_fp32(keeping("1.*"), model)
    assert formats.kept_modules(model) == [inner]
    seen = []
    inner[1].register_forward_hook(lambda module, args, outputs: seen.append(outputs.dtype))
    assert model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert seen == [torch.float32]
    formats.keep_in_fp32(keeping(), model)  # the task gives the same module again
    assert formats.kept_modules(model) == []
    tables = nn.ModuleList([nn.Embedding(2, 2), nn.Embedding(2, 2)])
    tables[1].weight = tables[0].weight
    formats.keep_in_fp32(keeping("1.*"), tables)
    assert formats.is_kept(tables[0].weight)


class Adding(nn.Linear):
    def forward(self, rows, losses):
        losses.append(super().forward(rows).mean())
        return losses[0]


def test_a_kept_part_may_add_to_a_list_that_it_is_given():
    model, losses = nn.ModuleList([Adding(2, 2), nn.Linear(2, 2)]), [torch.ones((), dtype=torch.bfloat16)]
    formats.keep_in_fp32(keeping("0.*"), model)
    model[0](torch.ones(1, 2, dtype=torch.bfloat16), losses)
    assert [loss.dtype for loss in losses] == [torch.float32] * 2


class Normed(dsframe.Task):
    """Layers with running statistics, which stay float32."""

    def model(self):
        norms = nn.BatchNorm2d(6), nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Conv2d(2, 6, 3), *norms, nn.Flatten(), nn.Linear(96, 2))

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self):
        inputs = torch.randn(48, 2, 6, 6, generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, inputs.mean((2, 3)).sin())

    eval_data = train_data


@pytest.mark.parametrize("section", [{"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 1.0}}])
def test_16_bits_train_norms_with_statistics(section, tmp_path):
    """torch has no such kernel on CPUs."""
    file = ds_config(12, "SGD", 0.1)
    settings = {"engine": "single", "steps": 4, "run_dir": str(tmp_path)}
    full, short = (dsframe.fit(Normed(), {**file, **more, "dsframe": settings}) for more in ({}, section))
    assert short.metrics["loss"] == pytest.approx(full.metrics["loss"], rel=2e-2)
    assert short.loss != full.loss

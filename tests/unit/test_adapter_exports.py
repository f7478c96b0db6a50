"""An adapter's model is the same model beside dsframe, merged as a folder of transformers, and as a folder of peft, both ways."""

import copy
import json
from contextlib import nullcontext

import peft
import pytest
import torch
import transformers
from torch import nn

from dsframe.config import load
from dsframe.errors import CheckpointError
from dsframe.model import adapter, adapter_export
from dsframe.tasks import _transformers
from tests.files import ds_config

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own, of tied weights and of embeddings that it saves

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
LLAMA = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0}
VIT = {**SIZES, "image_size": 16, "patch_size": 8, "num_labels": 3}
LM, TIED, BIASED = "LlamaForCausalLM", {"tie_word_embeddings": True}, {"attention_bias": True}
Q = {"target_modules": ["q_proj"]}
MODELS = {
    "plain": (LM, {}, {}),
    "tied, embeddings whole": (LM, TIED, {**Q, "modules_to_save": ["embed_tokens"]}),
    "tied, factors of both": (LM, TIED, {"target_modules": ["lm_head", "embed_tokens"]}),
    "factors of embeddings": (LM, {}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "rsLoRA": (LM, BIASED, {**Q, "use_rslora": True, "lora_alpha": 3.0}),
    "classifier of sequences": ("LlamaForSequenceClassification", {"num_labels": 3}, {}),
    "classifier of images": ("ViTForImageClassification", VIT, {}),
}


def build(name, sizes, seed=0):
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    return cls(cls.config_class(**(LLAMA if name.startswith("Llama") else {}) | sizes)).eval()


def with_adapter(model, section):
    """The model with the file's adapter, and weights as a training leaves them."""
    task = {"name": "causal-language-model", "model": {"model_type": "llama"}, "context": 16, "corpus": "synthetic"}
    config = load(ds_config(1, task=task, steps=1, engine="single", adapter=section))
    adapter.add(config, model)
    return model.eval()


def trained(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    return model


def outputs(model):
    return adapter_export.outputs_of(model)


def assert_outputs(model, expected, tolerance=0.0):
    torch.testing.assert_close(outputs(model), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", MODELS)
def test_merged_and_by_peft(kind, here):
    name, sizes, section = MODELS[kind]
    model = trained(with_adapter(build(name, sizes), {"r": 2, **section}))
    expected = outputs(model)
    adapter_export.write(copy.deepcopy(model), build(name, sizes), torch.float32, here / "peft")
    base = build(name, sizes)
    for of, parameter in base.named_parameters():
        if of.startswith(("score", "classifier")):  # a head that was drawn otherwise: the folder has its own
            parameter.data.normal_()
    theirs = peft.PeftModel.from_pretrained(base, "peft").eval()
    assert_outputs(theirs.get_base_model(), expected)
    again = with_adapter(build(name, sizes), {"folder": "peft"})
    assert_outputs(again, expected)
    config = {**json.loads(model.config.to_json_string()), "architectures": [name]}
    weights = dict(adapter_export.merge(model).state_dict())
    _transformers.write(config, weights, "float32", here / "merged", "5GB")
    merged = getattr(transformers, name).from_pretrained(here / "merged").eval()
    assert_outputs(merged, expected, 1e-4)
    assert adapter_export.difference(weights, merged.state_dict()) == ""


BY_PEFT = {
    "tied embeddings": (TIED, {"target_modules": ["embed_tokens", "q_proj"]}),
    "ranks": ({}, {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 1}}),
    "DoRA": ({}, {**Q, "use_dora": True}),
    "some tokens, tied": (TIED, {**Q, "trainable_token_indices": {"embed_tokens": [1, 3]}}),
    "biases": (BIASED, {"target_modules": "all-linear", "bias": "lora_only"}),
    "PiSSA, which changes the base": ({}, {**Q, "init_lora_weights": "pissa"}),
    "OLoRA, which changes a tied base": (TIED, {"target_modules": ["lm_head"], "init_lora_weights": "olora"}),
}


@pytest.mark.parametrize("kind", BY_PEFT)
def test_a_folder_of_peft_goes_on_and_comes_back(kind, here):
    sizes, settings = BY_PEFT[kind]
    given = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **{"init_lora_weights": False} | settings)
    theirs = trained(peft.get_peft_model(build(LM, sizes), given)).eval()
    theirs.save_pretrained("theirs")
    model = with_adapter(build(LM, sizes), {"folder": "theirs"})
    expected = outputs(theirs.get_base_model())
    assert_outputs(model, expected)
    assert {name for name, one in model.named_parameters() if one.requires_grad} == {
        name.removeprefix("base_model.model.") for name, one in theirs.named_parameters() if one.requires_grad
    }
    adapter_export.write(model, build(LM, sizes), torch.float32, here / "ours")
    back = peft.PeftModel.from_pretrained(build(LM, sizes), "ours").eval()
    assert_outputs(back.get_base_model(), expected)
    merged = adapter_export.merge(model)
    assert_outputs(merged, expected, 1e-4)


def test_several_parameters_of_a_module_are_merged(here):
    """Experts in two stacks of matrices, which peft wraps one in the other: a merge ended in a RecursionError."""
    sizes = {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1}
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    given = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], target_parameters=stacks)
    peft.get_peft_model(build("MixtralForCausalLM", sizes), given).save_pretrained("theirs")
    model = trained(with_adapter(build("MixtralForCausalLM", sizes), {"folder": "theirs"}))
    expected = outputs(model)
    merged = adapter_export.merge(model)
    assert_outputs(merged, expected, 1e-4)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(4, 4, 1, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(()), persistent=False)  # in no file, so nobody reads it

    def forward(self, x):
        self.calls += 1
        return self.norm(self.mix(x))


def test_what_a_training_changes_of_the_base_is_in_no_folder_of_peft(here):
    """BatchNorm's statistics: peft's readers had those of before, 1.7e-3 off in a loss."""
    said = r"has changed norm\.\w+, and .* train with \"norm\" in modules_to_save"
    for whole in (None, ["norm"]):
        model = with_adapter(Normed(), {"r": 2, "target_modules": ["mix"], "modules_to_save": whole})
        model.train()(torch.randn(8, 4, 2, 2))
        with nullcontext() if whole else pytest.raises(CheckpointError, match=said):
            adapter_export.write(model.eval(), Normed(), torch.float32, here / "peft")
    with pytest.raises(CheckpointError, match=r"peft cannot merge mix: .*groups.*; write --to peft"):
        adapter_export.merge(model)


@pytest.mark.parametrize("differ", [True, False])
def test_a_config_that_says_tied_has_one_matrix_or_two(differ, tmp_path):
    """Full fine-tuning: the folder was written as tied, and lost one of two matrices."""
    model = build(LM, TIED)
    config = {**json.loads(model.config.to_json_string()), "architectures": [LM]}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["lm_head.weight"] += 0.5 if differ else 0.0
    _transformers.write(config, weights, "float32", tmp_path / "out", "5GB")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert adapter_export.difference(weights, found.state_dict()) == ""
    assert found.config.tie_word_embeddings is not differ


def test_what_is_loaded_as_something_else_is_not_kept(tmp_path, monkeypatch):
    model = trained(with_adapter(build(LM, TIED), {"r": 2, "target_modules": ["embed_tokens"]}))
    base = build(LM, {**TIED, "initializer_range": 0.2})
    with pytest.raises(CheckpointError, match=r"peft has loaded the written folder, the model's outputs .* off by"):
        adapter_export.write(copy.deepcopy(model), base, torch.float32, tmp_path / "peft")
    monkeypatch.setattr(adapter_export, "_untie", lambda model: None)
    with pytest.raises(CheckpointError, match="the adapter is merged, the model's outputs for one batch are off by"):
        adapter_export.merge(model)


def test_a_folder_of_peft_in_16_bits_is_compared_with_what_was_rounded(here):
    name, sizes, section = MODELS["tied, embeddings whole"]
    model = trained(with_adapter(build(name, sizes), {"r": 2, **section}))
    adapter_export.write(model, build(name, sizes), torch.bfloat16, here / "peft")
    theirs = peft.PeftModel.from_pretrained(build(name, sizes), "peft").eval()
    assert_outputs(theirs.get_base_model(), outputs(model))

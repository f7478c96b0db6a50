"""Language models of transformers as chains of layers: which are, and which are refused before anything starts."""

import importlib
import importlib.util

import pytest
import torch
from torch import nn

from dsframe import tasks
from dsframe.config import load
from dsframe.errors import TaskError
from dsframe.tasks import decoder
from dsframe.tasks.huggingface import small
from dsframe.tasks.layers import Tied, ready
from tests.files import ds_config
from tests.text_files import LLAMA
from tests.unit.test_shared_sequences import config

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)


@pytest.mark.parametrize("tied", [False, True])
def test_a_chain_is_the_model(tied):
    """Outputs and gradients; the names stay the model's."""
    settings = {**LLAMA, "tie_word_embeddings": tied}
    section = {"name": "causal-language-model", "model": settings, "context": 16}
    task = tasks.build(load(ds_config(8, task=section)).settings.task, 1)
    torch.manual_seed(0)
    model = task.model()
    layers = task.cut(model)
    assert [type(layer).__name__ for layer in layers[1:3]] == ["DecoderBlock"] * 2
    assert isinstance(layers[-1], Tied) == tied
    assert task.pretrained_config.num_hidden_layers == 2, "its smaller copy is tried"
    chain, tokens = nn.Sequential(*ready(layers)), torch.randint(256, (2, 16))
    expected, found = model(tokens).logits, chain(tokens)
    torch.testing.assert_close(found, expected)
    task.loss(found, tokens).backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    task.loss(model(tokens), tokens).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.parametrize("kind", ["qwen3", "gemma"])
def test_kinds_that_can_be_split(kind):
    before = torch.get_rng_state()
    decoder.refuse_other_models(small(config(kind, head_dim=8)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("gpt2", {}, "it has other parts than a Llama"),
        ("gemma2", {"head_dim": 8}, "it does more than its layers do, one after the other"),
        ("gemma3_text", {"head_dim": 8}, "its blocks need more inputs than the output"),
        ("mistral", {"sliding_window": 4096}, "it does more than its layers do, one after the other"),
        ("mixtral", {"output_router_logits": True}, "no stage has the routers of all blocks"),
    ],
)
def test_kinds_that_are_refused(kind, more, message):
    """A window is missed where it is longer than the text of the trial, too."""
    with pytest.raises(
        TaskError, match=f'pipeline: a model of model_type "{kind}" cannot be split into stages: {message}'
    ):
        decoder.refuse_other_models(small(config(kind, **more)))

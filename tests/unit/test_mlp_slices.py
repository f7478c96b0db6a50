"""``mlp_chunk_tokens``: an mlp in slices gives the same outputs and gradients, and keeps what is wide for one slice alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsframe import tasks
from dsframe.config import Config, load
from dsframe.errors import ConfigError
from dsframe.model import switches

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def config(tokens: int | None, model: dict[str, Any] | None = None, **more: Any) -> Config:
    task = {"name": "causal-language-model", "model": model or LLAMA, "context": 16, "corpus": "synthetic"}
    return load({"train_batch_size": 8, "dsframe": {"task": task, "model": {"mlp_chunk_tokens": tokens, **more}}})


def made(tokens: int | None, model: dict[str, Any] | None = None, **more: Any) -> nn.Module:
    file = config(tokens, model, **more)
    torch.manual_seed(0)
    found = tasks.build(file.settings.task, 0).model()
    switches.apply(found, file, torch.device("cpu"))
    return found


def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor], int]:
    """Outputs, gradients, and the bytes that wait for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.arange(3 * 11).view(3, 11) % 50
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(tokens).logits
    outputs.square().mean().backward()
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": True}])
@pytest.mark.parametrize("tokens", [1, 4, 33, 100])
def test_slices_are_exact(tokens: int, more: dict[str, Any]) -> None:
    """Whether they divide the tokens or not, and inside of recomputed blocks; parameters keep their names."""
    plain, sliced = run(made(None)), run(made(tokens, **more))
    torch.testing.assert_close(sliced[0], plain[0], atol=1e-6, rtol=1e-5)
    assert sliced[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        torch.testing.assert_close(sliced[1][name], gradient, atol=1e-6, rtol=1e-5)
    if tokens < 33:
        assert sliced[2] < 0.8 * plain[2]


def test_what_cannot_be_sliced_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a mixture of experts, which is not sliced"):
        made(4, {**LLAMA, "model_type": "mixtral", "num_local_experts": 2})
    with pytest.raises(ConfigError, match="no module of the model is called mlp"):
        made(
            4,
            {
                "model_type": "opt",
                "hidden_size": 16,
                "num_attention_heads": 2,
                "ffn_dim": 32,
                "num_hidden_layers": 1,
                "word_embed_proj_dim": 16,
            },
        )
    with pytest.raises(ConfigError, match="mlp has dropout, whose masks would differ in slices; set it to 0"):
        made(4, {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2})
    with pytest.raises(ConfigError, match=r"not possible with dsframe\.model\.compile"):
        config(4, compile="blocks")
    with pytest.raises(ConfigError, match="is for language models of transformers"):
        load({"train_batch_size": 8, "dsframe": {"task": {"name": "vision"}, "model": {"mlp_chunk_tokens": 4}}})


class Mixed(nn.Module):
    """Whose mlp averages over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(4, 4)
        self.mlp.forward = lambda hidden: hidden - hidden.mean(1, keepdim=True)  # type: ignore[method-assign]

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.mlp(hidden)
        return found


def test_tokens_that_see_each_other_are_noticed() -> None:
    model = Mixed()
    switches.compute_in_slices(model.mlp, 2)
    with pytest.raises(ConfigError, match="lets tokens see each other, so it cannot be sliced"):
        model(torch.randn(1, 6, 4))

"""Splits language models of transformers that are a chain, such as Llama, into layers that each take the previous one's
output. The layers are the model's own modules: embeddings, blocks, norm and output layer (a tie if it shares the
embeddings' weight). Each block computes the rotary angles of the positions itself."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.errors import TaskError
from dsframe.tasks import _transformers
from dsframe.tasks.layers import Layer, Tied, ready
from dsframe.text import one_line

_WINDOW = 3
"""Positions of a sliding window in a small model, few enough that ignoring it changes the output."""


class DecoderBlock(nn.Module):
    """A block of the model: ``[rows, time, width]`` to the same shape."""

    def __init__(self, layer: nn.Module, angles: nn.Module) -> None:
        super().__init__()
        self.layer, self.angles = layer, angles

    def forward(self, stream: Tensor) -> Tensor:
        places = torch.arange(stream.shape[1], device=stream.device)[None]
        # Without a mask attention is causal.
        return self.layer(  # type: ignore[no-any-return]
            stream, attention_mask=None, position_ids=places, position_embeddings=self.angles(stream, places)
        )


def cut(model: Any) -> list[Layer] | None:
    """Returns the layers of ``model``; None if it does not have the parts of a Llama."""
    inner = getattr(model, "model", None)
    parts: list[Any] = [getattr(inner, name, None) for name in ("embed_tokens", "layers", "norm", "rotary_emb")]
    head: Any = getattr(model, "lm_head", None)
    if head is None or None in parts:
        return None
    embeddings, blocks, norm, angles = parts
    tied = head.weight is embeddings.weight
    last: Layer = Tied(0, nn.functional.linear) if tied and head.bias is None else head
    return [embeddings, *(DecoderBlock(block, angles) for block in blocks), norm, last]


def refuse_other_models(config: Any) -> None:
    """Raises TaskError if a small model of this ``config`` computes anything but the chain of its layers."""
    model_type, problem = config.model_type, ""
    for name in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(config, name, None), int):
            with contextlib.suppress(AttributeError):
                setattr(config, name, _WINDOW)
    if getattr(config, "output_router_logits", False):
        problem = "no stage has the routers of all blocks, which output_router_logits needs"
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        model: Any = _transformers.build("AutoModelForCausalLM", config, None).eval()
        layers = cut(model)
        if layers is None:
            problem = problem or "it has other parts than a Llama"
        elif not problem:
            problem = _difference(model, layers)
    if problem:
        raise TaskError(
            f'pipeline: a model of model_type "{model_type}" cannot be split into stages: {problem}; use "zero_optimization" or '
            '"tensor_parallel" instead, or another model'
        )


def _difference(model: Any, layers: Sequence[Layer]) -> str:
    tokens = torch.randint(1, 60, (2, 12))
    expected, stream = model(input_ids=tokens).logits, tokens
    try:
        for layer in ready(layers):
            stream = layer(stream)
    except Exception as error:  # any error, since the model is unknown
        return f"its blocks need more inputs than the output of the block before ({one_line(error)})"
    if torch.allclose(stream, expected, atol=1e-5, rtol=1e-4):
        return ""
    return "it does more than its layers do, one after the other"

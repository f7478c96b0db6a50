"""Language modelling on bytes: a GPT that predicts the next byte of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that every torch program uses

from dsframe.data import text
from dsframe.data.source import Source
from dsframe.errors import TaskError
from dsframe.tasks.layers import Layer, Tied
from dsframe.tasks.task import Attention, Sum, Sums, Task, accuracy

if TYPE_CHECKING:
    from dsframe.config.schema.settings import LanguageTask as LanguageSettings

BYTES = 256
"""Vocabulary size."""


class LanguageTask(Task):
    """Computes cross entropy over the next byte. Reports loss (nats per byte), bits per byte, and accuracy."""

    unit = "tokens"
    partition_config = {  # noqa: RUF012  # Megatron's cut (Shoeybi et al. 2019, arXiv 1909.08053): whole heads, then whole rows
        "layer_specs": [
            {
                "patterns": [r".*\.query_key_value\.weight$"],
                "partition_type": "column",
                "shape": [3, -1],  # query, key and value each
                "partition_dim": 0,
            },
            {"patterns": [r".*\.expand\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.(projection|contract)\.weight$"], "partition_type": "row"},
        ]
    }

    def __init__(self, settings: LanguageSettings, seed: int) -> None:
        if settings.width % settings.heads:
            raise TaskError(f"task: width {settings.width} is not a multiple of heads {settings.heads}")
        self.settings, self.seed = settings, seed
        self.units_per_sample = settings.context
        self.hidden_size = settings.width
        self._sources: tuple[text.TextSource, text.TextSource] | None = None

    def layers(self) -> Sequence[Layer]:
        s = self.settings
        return gpt(layers=s.layers, heads=s.heads, width=s.width, context=s.context, tie_embeddings=s.tie_embeddings)

    def share_sequences(
        self, model: nn.Module, part: int, parts: int, exchange: Callable[[Attention], Attention]
    ) -> None:
        for name, number in (("heads", self.settings.heads), ("context", self.settings.context)):
            if number % parts:
                raise TaskError(f"task: {name} {number} is not divisible by sequence_parallel_size {parts}")
        for layer in model.modules():
            if isinstance(layer, Positions):
                layer.part = part
            elif isinstance(layer, Block):
                layer.attention = exchange(causal)

    def example(self) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(1, self.settings.context, dtype=torch.int64, device="meta")
        return tokens, tokens

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def metrics(self, outputs: Tensor, targets: Tensor) -> Sums:
        total = F.cross_entropy(outputs.float().flatten(0, -2), targets.flatten(), reduction="sum")
        return {
            "loss": Sum(total, targets.numel()),
            "bits_per_byte": Sum(total / math.log(2), targets.numel()),
            "accuracy": accuracy(outputs, targets),
        }

    def train_data(self) -> Source:
        return self._data()[0]

    def eval_data(self) -> Source:
        return self._data()[1]

    def _data(self) -> tuple[text.TextSource, text.TextSource]:
        if self._sources is None:
            s = self.settings
            self._sources = text.sources(s.corpus, s.context, s.samples, self.seed)
        return self._sources


def gpt(*, layers: int, heads: int, width: int, context: int, tie_embeddings: bool = True) -> list[Layer]:
    """Returns a GPT-2 of ``layers`` blocks as layers: int64 ``[batch, time]`` to logits ``[batch, time, 256]``.

    Pre-norm blocks, learned positions, causal attention, GPT-2's initialization: standard deviation 0.02, and 0.02 /
    sqrt(2 x layers) in projections to the residual stream. If tied, the output layer uses the embeddings of the bytes.
    """
    return [
        partial(Tokens, BYTES, width),
        partial(Positions, context, width),
        *[partial(Block, width, heads, residual_std=0.02 / math.sqrt(2 * layers))] * layers,
        partial(nn.LayerNorm, width),
        Tied(0, F.linear) if tie_embeddings else partial(Output, width, BYTES),
    ]


class _Linear(nn.Linear):
    """A linear layer that initializes itself, because ZeRO-3 partitions its weight as soon as ``__init__`` returns."""

    def __init__(self, inputs: int, outputs: int, std: float = 0.02, bias: bool = True) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Tokens(nn.Embedding):
    """Embeds bytes: int64 ``[batch, time]`` to ``[batch, time, width]``. Initializes itself, like :class:`_Linear`."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Positions(Tokens):
    """Adds learned position embeddings: ``[batch, time, width]`` to the same shape."""

    part = 0
    """Index of this process's slice along time."""

    def forward(self, stream: Tensor) -> Tensor:
        time = stream.shape[-2]
        return stream + super().forward(torch.arange(time, device=stream.device) + self.part * time)


class Output(_Linear):
    """Computes logits with separate weights: ``[batch, time, width]`` to ``[batch, time, 256]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes causal attention: ``[batch, time, heads, head size]`` for each input and the result."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if query.dtype == torch.bfloat16 and query.device.type == "cpu" and query.shape[-2] <= _SHORT:
        return _products(query, key, value).transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


_SHORT = 512
"""Up to this number of positions, matrix products are faster than torch 2.13's attention in bfloat16 on a CPU, whose
backward pass is slower than in fp32: forward and backward take a quarter of the time at 128 positions, two thirds at
512; gradients are as exact."""


def _products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes the same attention, ``[batch, heads, time, head size]``, as two matrix products that keep the full score
    matrix.

    The memory plan ignores it: on the meta device it counts torch's attention. For a bf16 model on CPUs it is too low
    by 2 x batch x heads x time² bytes a layer, less the 4 x batch x heads x time that torch's attention keeps.
    """
    time, size = query.shape[-2:]
    later = query.new_full((time, time), -math.inf).triu_(1)
    rows, columns, values = (tensor.flatten(0, 1) for tensor in (query, key, value))
    scores = torch.baddbmm(later, rows, columns.transpose(1, 2), alpha=1 / math.sqrt(size))
    return torch.bmm(scores.softmax(-1), values).view(query.shape)


class Block(nn.Module):
    """Attention, then an MLP, each on a normalized copy and added to the residual stream."""

    def __init__(self, width: int, heads: int, residual_std: float) -> None:
        super().__init__()
        self.head_size = width // heads
        self.attention: Attention = causal
        self.norm_1 = nn.LayerNorm(width)
        self.query_key_value = _Linear(width, 3 * width)
        self.projection = _Linear(width, width, residual_std)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = _Linear(width, 4 * width)
        self.contract = _Linear(4 * width, width, residual_std)

    def forward(self, stream: Tensor) -> Tensor:
        batch, time, _ = stream.shape
        # [batch, time, 3 x heads x head size] to three of [batch, time, heads, head size]; heads may be sharded
        packed = self.query_key_value(self.norm_1(stream)).view(batch, time, 3, -1, self.head_size)
        mixed = self.attention(*packed.unbind(2))
        stream = stream + self.projection(mixed.reshape(batch, time, -1))
        hidden = F.gelu(self.expand(self.norm_2(stream)), approximate="tanh")
        return stream + self.contract(hidden)  # type: ignore[no-any-return]

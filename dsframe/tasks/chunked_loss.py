"""The cross entropy of a language model a slice of tokens at a time, without the logits of all of them.

Logits over a vocabulary of 128,000 words take 2 GB in fp32 for 4,096 tokens, and a loss needs them three times. Here a slice's
logits, its loss and its gradients are computed together and given up before the next slice (as in Liger kernels, Hsu et al. 2024,
arXiv 2410.10989). The result is exact. The output layer itself computes it, inside its own forward pass: that is where ZeRO-3 and
FSDP have gathered its weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsframe.data.packed import IGNORED

_ELEMENTS = 1 << 25
"""Logits of one slice where the file says "auto": 128 MiB in fp32."""


def tokens_of(vocabulary: int) -> int:
    """Returns the tokens of a slice where the file says ``"auto"``: at least 64."""
    return max(64, _ELEMENTS // vocabulary)


def is_scored(outputs: Tensor, targets: Tensor) -> bool:
    """True if ``outputs`` are :func:`cross_entropy`'s, and no logits, which have one dimension more than ``targets``."""
    return outputs.ndim == targets.ndim


def mean(scores: Tensor) -> Tensor:
    """Returns the mean loss over the targets that count; NaN where none does, as torch's cross entropy is."""
    return scores[:, 0].sum() / scores[:, 1].sum()


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tokens: int) -> Tensor:
    """Returns for each row the sum of its losses, how many targets count, and of how many the logit is the largest.

    The last of them is 0 while gradients are wanted: training asks for none. Gradients belong to the sum over all rows.

    Args:
        hidden: Inputs of the output layer, ``[rows, time, width]``, of any floating-point dtype.
        weight: ``[vocabulary, width]``. ``bias``: ``[vocabulary]`` or None.
        targets: int64 ``[rows, time]``; IGNORED where nothing counts.
        tokens: Of a slice.

    Returns:
        ``[rows, 3]``, float32, or float64 where ``hidden`` is.
    """
    training = torch.is_grad_enabled()
    result: Tensor = _CrossEntropy.apply(hidden, weight, bias, targets, tokens, training)  # type: ignore[no-untyped-call]
    return result


class _CrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, of the sum of all losses; the backward pass multiplies them by what comes in.

    16-bit formats: products are of 16-bit numbers, as the layer's own are, everything else is fp32, the weight's gradient too.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tokens: int, training: bool
    ) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        flat, labels = hidden.flatten(0, -2), targets.flatten()
        columns = torch.zeros(3, len(labels), dtype=wide, device=hidden.device)
        wants = [training and needed for needed in ctx.needs_input_grad[:3]]
        of_hidden = torch.empty_like(flat) if wants[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if wants[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wants[2] else None
        for first in range(0, len(labels), tokens):
            part = slice(first, first + tokens)
            piece, expected = flat[part], labels[part]
            counted = expected != IGNORED
            index = expected.clamp(min=0)[:, None]
            logits = torch.nn.functional.linear(piece, weight, bias).to(wide)
            if not training:
                columns[2, part] = (logits.argmax(-1) == expected).to(wide)
            logits -= logits.amax(-1, keepdim=True)
            chosen = logits.gather(-1, index)[:, 0]
            total = logits.exp_().sum(-1)
            columns[0, part] = torch.where(counted, total.log() - chosen, 0.0)
            columns[1, part] = counted.to(wide)
            if not any(wants):
                continue
            # The softmax, less 1 at the target: what the sum of the losses changes by.
            slope = logits.mul_((counted / total)[:, None])
            slope.scatter_add_(-1, index, -counted.to(wide)[:, None])
            if of_bias is not None:
                of_bias += slope.sum(0)
            narrow = slope.to(weight.dtype)
            if of_hidden is not None:
                of_hidden[part] = narrow @ weight
            if of_weight is not None:
                _add_product(of_weight, narrow, piece)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.formats = hidden.shape, weight.dtype, None if bias is None else bias.dtype
        return columns.view(3, len(targets), -1).sum(-1).t().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        shape, of_matrix, of_vector = ctx.formats
        factor = outer[0, 0]  # every row's: the sum of all losses is what was differentiated
        return (
            None if of_hidden is None else (of_hidden * factor.to(of_hidden.dtype)).view(shape),
            None if of_weight is None else of_weight.mul_(factor).to(of_matrix),
            None if of_bias is None else of_bias.mul_(factor).to(of_vector),
            None,
            None,
            None,
        )


def _add_product(total: Tensor, slope: Tensor, piece: Tensor) -> None:
    device_type = total.device.type  # autocast knows no device "meta"
    casts = device_type != "meta" and torch.is_autocast_enabled(device_type)
    if slope.dtype == total.dtype == piece.dtype and not casts:
        total.addmm_(slope.t(), piece)
    else:
        total += slope.t() @ piece

"""Runs transformers models with sequence parallelism: each rank has a slice of the positions, and attention covers all
of them.

Transformers selects attention by name; a separate name leaves other models in the process unchanged. Slices of all
heads are exchanged for all positions of some heads (Ulysses; Jacobs et al. 2023, arXiv 2309.14509), and back. The
positions of the complete row, which each rank has read, show where documents begin; documents in a row do not attend to
each other. Rows are padded on the right, so no token comes after padding and none needs a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that every torch program uses

from dsframe.errors import TaskError
from dsframe.tasks import _transformers
from dsframe.tasks.task import Attention
from dsframe.text import one_line

_NAME = "dsframe_shared_sequences"
_OWNER = "_dsframe_sequences"
"""Attribute of a model's modules: the object that computes their attention."""
_SUPPORTED = {"position_ids", "is_causal", "sliding_window", "cache_position", "use_cache", "output_attentions"}
_SUPPORTED |= {"output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"}
"""Arguments of attention that have no effect here, or that are supported."""


class Sequences:
    """Computes attention over complete sequences for a model that has slices of them."""

    def __init__(self, model: nn.Module, parts: int, exchange: Callable[[Attention], Attention]) -> None:
        """Makes ``model`` use it. ``exchange``: as in ``Task.share_sequences``; ``parts``: slices of a sequence."""
        self._parts, self._exchange = parts, exchange
        self._documents: list[list[int]] | None = None
        self.calls = 0
        _transformers.register_attention(_NAME, _attention)
        for module in model.modules():
            object.__setattr__(module, _OWNER, self)
        model.set_attn_implementation(_NAME)  # type: ignore[operator]

    def see(self, inputs: Any) -> dict[str, Any]:
        """Returns complete ``inputs`` with the position of each token, and remembers where documents begin."""
        named = dict(inputs) if isinstance(inputs, dict) else {"input_ids": inputs}
        tokens, places = named["input_ids"], named.get("position_ids")
        self._documents = None
        if places is None:
            named["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        else:
            begins = (places[:, 1:] != places[:, :-1] + 1).cpu()
            self._documents = [_lengths(row) for row in begins]
        return named

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float, window: int | None
    ) -> Tensor:
        """Computes attention for this rank's slice. Inputs: ``[rows, heads, slice of time, head size]``, of which keys
        and values may have fewer heads. Result: ``[rows, slice of time, heads, head size]``."""
        self.calls += 1
        heads, groups = query.shape[1], key.shape[1]
        copies = _copies(heads, groups, self._parts)
        if copies > 1:  # so that each rank has complete heads
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))

        def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            each = query.shape[2] // key.shape[2]
            parts = [tensor.transpose(1, 2) for tensor in (query, key, value)]
            if each > 1:
                parts[1:] = [tensor.repeat_interleave(each, dim=1) for tensor in parts[1:]]
            return self._causal(parts, scale, dropout, window).transpose(1, 2)

        return self._exchange(whole)(*(tensor.transpose(1, 2) for tensor in (query, key, value)))

    def _causal(self, parts: list[Tensor], scale: float | None, dropout: float, window: int | None) -> Tensor:
        if self._documents is None:
            return _causal_attention(parts, scale, dropout, window)
        rows = []
        for row, lengths in enumerate(self._documents):
            pieces = zip(*(torch.split(tensor[row : row + 1], lengths, dim=2) for tensor in parts), strict=True)
            rows.append(torch.cat([_causal_attention(list(piece), scale, dropout, window) for piece in pieces], dim=2))
        return torch.cat(rows)


def _causal_attention(parts: list[Tensor], scale: float | None, dropout: float, window: int | None) -> Tensor:
    """Computes causal attention, ``[rows, heads, time, head size]``; with ``window`` only to the last positions."""
    query, key, value = parts
    time, mask = query.shape[2], None
    if window is not None and window < time:
        places = torch.arange(time, device=query.device)
        behind = places[:, None] - places
        mask = (behind >= 0) & (behind < window)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None, scale=scale)


def _lengths(begins: Tensor) -> list[int]:
    """Returns the lengths of a row's documents. ``begins``: whether one begins at each position but the first."""
    starts = [0, *(begins.nonzero()[:, 0] + 1).tolist(), len(begins) + 1]
    return [end - start for start, end in pairwise(starts)]


def _copies(heads: int, groups: int, parts: int) -> int:
    """Returns how often to repeat ``groups`` key heads, so that ``parts`` ranks have complete ones."""
    few = parts // math.gcd(groups, parts)
    return few if (heads // groups) % few == 0 else heads // groups


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls; ``named``: the model's own arguments. Raises TaskError for unknown ones."""
    scale, dropout = named.pop("scaling", None), named.pop("dropout", 0.0)
    strange = [name for name, value in named.items() if value is not None and name not in _SUPPORTED]
    if strange or attention_mask is not None or named.get("is_causal") is False:
        what = ", ".join(strange) or "a mask of its own"
        raise TaskError(
            f"sequence_parallel_size: this model's attention uses {what}, which dsframe cannot apply to slices of sequences"
        )
    owner: Sequences = getattr(module, _OWNER)
    return owner.attend(query, key, value, scale, dropout, named.get("sliding_window")), None


def refuse_unshareable(config: Any, parts: int) -> None:
    """Raises TaskError if ``parts`` ranks cannot split the heads of a model of this configuration, or if a small one
    shows that its positions interact outside attention. ``config``: of a small model with as many heads as the large
    one."""
    model_type, heads = config.model_type, getattr(config, "num_attention_heads", 0)
    if heads and heads % parts:
        raise TaskError(
            f"task.model: num_attention_heads {heads} is not divisible by sequence_parallel_size {parts}; choose another"
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.manual_seed(0)
        model: Any = _transformers.build("AutoModelForCausalLM", config, None).eval()
        tokens = torch.randint(1, 60, (2, 12))
        tokens[1, 1:] = tokens[0, 1:]
        before, problem = model(input_ids=tokens).logits, ""
        try:
            shared = Sequences(model, 1, lambda attention: attention)
            after = model(**shared.see(tokens)).logits
            layers, shared.calls = shared.calls, 0
            blind = Sequences(model, 1, lambda attention: lambda query, key, value: query)
            alone = model(**blind.see(tokens)).logits
        except (TaskError, ValueError, KeyError, AttributeError) as error:
            problem = one_line(error)
        else:
            if not layers:
                problem = "its attention does not go through transformers' interface"
            elif not torch.allclose(before, after, atol=1e-5, rtol=1e-4):
                problem = f"its attention is another one (outputs differ by {float((before - after).abs().max()):.1g})"
            elif not torch.equal(alone[0, 1:], alone[1, 1:]):
                problem = "its positions look at each other outside of attention"
    if problem:
        raise TaskError(
            f'sequence_parallel_size: not possible with model_type "{model_type}": {problem}; '
            "train it without, or choose another model"
        )

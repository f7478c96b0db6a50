"""``nn.Embedding(max_norm=...)`` on any number of ranks.

torch shortens the rows that a forward pass looks up, in place: the rows of one rank's samples, in the model's weights. Where
ranks hold copies these drift apart; where the optimizer has masters or shards it writes over them. So the rows of all ranks are
shortened, where the optimizer has them. Arithmetic as in torch 2.13, ``aten/src/ATen/native/Embedding.cpp``
(embedding_renorm_cpu_).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.errors import EngineError
from dsframe.model.gathered import library_of


class LimitedEmbedding(nn.Embedding):
    """An embedding whose limit holds on all ranks."""

    limit: float
    shorten: Callable[[LimitedEmbedding, Tensor], None] | None
    """None of a frozen one, which is left as it is."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        if self.training and self.shorten:
            self.shorten(self, input)
            return super().forward(input)
        rows = super().forward(input)
        norms = rows.norm(self.norm_type, dim=-1, keepdim=True)
        return torch.where(norms > self.limit, rows * (self.limit / (norms + 1e-7)), rows)


def share_limits(model: nn.Module, engine: Any) -> None:
    """Lets the limits of the embeddings of ``model`` hold on all ranks of ``engine``, a ``ModelEngine``."""
    for name, module in model.named_modules():
        limit = getattr(module, "limit", module.max_norm) if isinstance(module, nn.Embedding) else None
        if type(module) in (nn.Embedding, LimitedEmbedding) and limit is not None:
            weight = f"{name}.weight".removeprefix(".")
            module.__class__, module.max_norm = LimitedEmbedding, None
            trained = module.weight.requires_grad
            vars(module).update(limit=limit, shorten=_shortening(engine, weight) if trained else None)


def written(model: nn.Module) -> frozenset[str]:
    """Returns the names of the weights that forward passes in training write for it."""
    limited = {name: module for name, module in model.named_modules() if isinstance(module, LimitedEmbedding)}
    return frozenset(f"{name}.weight".removeprefix(".") for name, module in limited.items() if module.shorten)


def refuse(model: nn.Module) -> None:
    """Raises EngineError where a pipeline would leave each rank with limits of its own."""
    if any(getattr(module, "max_norm", None) is not None for module in model.modules()):
        raise EngineError("a pipeline cannot keep an embedding's max_norm; leave it out, or train without a pipeline")


def _shortening(engine: Any, name: str) -> Callable[[LimitedEmbedding, Tensor], None]:
    """**Collective.** What shortens the rows that any rank looks up."""

    @torch.no_grad()
    def shorten(module: LimitedEmbedding, indices: Tensor) -> None:
        used = torch.zeros(module.num_embeddings, dtype=torch.float64, device=indices.device)
        used[indices.flatten()] = 1.0
        rows = engine.sum_over_ranks(used).nonzero().flatten()
        view = engine.view(name)
        piece = view.cut(view.master.detach())
        whole = view.whole(piece)
        torch.embedding_renorm_(whole, rows, module.limit, module.norm_type)
        if whole is not piece:
            view.put(whole)
        module.weight.copy_(whole)
        if library := library_of(module.weight):
            library.keep(module.weight)

    return shorten

"""Implements ``nn.Embedding(max_norm=...)`` and ``nn.EmbeddingBag(max_norm=...)`` on any number of ranks.

Torch renormalizes the rows that a forward pass looks up, in place: those of one rank's samples, in the model's weights.
Replicas then diverge, and an optimizer with masters or shards overwrites the change. So the rows of all ranks are
renormalized in the optimizer's copy. Arithmetic as in torch 2.13, ``aten/src/ATen/native/Embedding.cpp``
(embedding_renorm_cpu_).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.errors import EngineError
from dsframe.model.gathered import library_of


class _Limited:
    """Attributes of an embedding with a maximum norm."""

    limit: float
    shorten: Callable[[Any, Tensor], None] | None
    """**Collective.** Renormalizes the rows that any rank uses; None for a frozen embedding, which does not change."""


class LimitedEmbedding(_Limited, nn.Embedding):
    """An embedding whose maximum norm applies on all ranks."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        if self.training and self.shorten:
            self.shorten(self, input)
            return super().forward(input)
        return _shortened(super().forward(input), self)


class LimitedBag(_Limited, nn.EmbeddingBag):
    """A sum or mean of embeddings whose maximum norm applies on all ranks."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if self.training and self.shorten:
            self.shorten(self, input)
            return super().forward(input, offsets, per_sample_weights)
        numbers, places = torch.unique(input, return_inverse=True)
        padding = (numbers == self.padding_idx).nonzero().flatten().tolist() if self.padding_idx is not None else []
        return nn.functional.embedding_bag(
            places,
            _shortened(self.weight[numbers], self),
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding[0] if padding else None,
        )


def _shortened(rows: Tensor, module: Any) -> Tensor:
    norms = rows.norm(module.norm_type, dim=-1, keepdim=True)
    return torch.where(norms > module.limit, rows * (module.limit / (norms + 1e-7)), rows)


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Embedding: LimitedEmbedding, nn.EmbeddingBag: LimitedBag}
for _base, _kind in _KINDS.items():
    _kind.__name__ = _base.__name__  # as files and messages name it


def share_limits(model: nn.Module, engine: Any) -> None:
    """Makes the maximum norms of embeddings in ``model`` apply on all ranks of ``engine``, a ``ModelEngine``."""
    for name, module in model.named_modules():
        kind: Any = next((kind for base, kind in _KINDS.items() if isinstance(module, base)), None)
        limit = module.limit if isinstance(module, _Limited) else getattr(module, "max_norm", None)
        if kind is None or limit is None:
            continue
        if not isinstance(module, _Limited):
            if _names_limit(type(module)):
                continue  # its own forward applies it
            cls = type(module)
            module.__class__ = (
                kind if cls in _KINDS else type(cls.__name__, (cls, kind), {"__module__": cls.__module__})
            )
        weight = f"{name}.weight".removeprefix(".")
        vars(module).update(
            max_norm=None, limit=limit, shorten=_shortening(engine, weight) if module.weight.requires_grad else None
        )


def _names_limit(cls: type) -> bool:
    """Returns True if a method of a user's class reads ``max_norm`` outside ``__init__``."""
    users = [base for base in cls.__mro__ if issubclass(base, tuple(_KINDS)) and base not in _KINDS]
    functions = [value for base in users for name, value in vars(base).items() if name != "__init__"]
    return any("max_norm" in getattr(getattr(value, "__code__", None), "co_names", ()) for value in functions)


def written(model: nn.Module) -> frozenset[str]:
    """Returns the names of the weights that are renormalized in training."""
    limited = {name: module for name, module in model.named_modules() if isinstance(module, _Limited)}
    return frozenset(f"{name}.weight".removeprefix(".") for name, module in limited.items() if module.shorten)


def tied(model: nn.Module) -> list[str]:
    """Returns those of these names whose weights have other names too. The other modules see rows that a later micro-batch of
    the step renormalizes."""
    ids = [id(weight) for _, weight in model.named_parameters(remove_duplicate=False)]
    return sorted(name for name in written(model) if ids.count(id(model.get_parameter(name))) > 1)


def refuse(model: nn.Module) -> None:
    """Raises EngineError if the model has a maximum norm, which ranks of a pipeline cannot share."""
    if any(getattr(module, "max_norm", None) is not None for module in model.modules()):
        raise EngineError("a pipeline cannot keep an embedding's max_norm; leave it out, or train without a pipeline")


def _shortening(engine: Any, name: str) -> Callable[[Any, Tensor], None]:
    """Returns a **collective** function that renormalizes the rows that any rank looks up."""

    @torch.no_grad()
    def shorten(module: Any, indices: Tensor) -> None:
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

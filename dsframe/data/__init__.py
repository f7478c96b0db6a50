"""Data: sources, the order of samples, and loaders.

``Source`` is what a task may return besides a map-style torch ``Dataset``; ``Loader`` and ``EvaluationLoader`` give one
rank its batches; ``draws`` is randomness that belongs to a sample. Each name is loaded when it is first used, so that
``python -m dsframe.data.fetch`` need not import torch to see that everything is there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsframe.data.collate import Pad
    from dsframe.data.loader import EvaluationLoader, Loader, as_source
    from dsframe.data.mixture import Mixture
    from dsframe.data.preferences import Preferences
    from dsframe.data.sampler import Sampler, evaluation_rows, permutation
    from dsframe.data.shards import Shards
    from dsframe.data.source import Batch, ImageSource, Source, TensorSource, draws

_HOMES = {
    "dsframe.data.collate": ("Pad",),
    "dsframe.data.loader": ("EvaluationLoader", "Loader", "as_source"),
    "dsframe.data.mixture": ("Mixture",),
    "dsframe.data.preferences": ("Preferences",),
    "dsframe.data.sampler": ("Sampler", "evaluation_rows", "permutation"),
    "dsframe.data.shards": ("Shards",),
    "dsframe.data.source": ("Batch", "ImageSource", "Source", "TensorSource", "draws"),
}

__all__ = [
    "Batch",
    "EvaluationLoader",
    "ImageSource",
    "Loader",
    "Mixture",
    "Pad",
    "Preferences",
    "Sampler",
    "Shards",
    "Source",
    "TensorSource",
    "as_source",
    "draws",
    "evaluation_rows",
    "permutation",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

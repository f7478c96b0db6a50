"""Data: sources, the order of samples, and loaders.

``Source`` is what a task may return besides a map-style torch ``Dataset``; ``Loader`` and ``EvaluationLoader`` give one
rank its batches; ``draws`` is randomness that belongs to a sample. Each name is loaded when it is first used, so that
``python -m dsframe.data.fetch`` need not import torch to see that everything is there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsframe.data.collate import Pad as Pad
    from dsframe.data.loader import EvaluationLoader as EvaluationLoader
    from dsframe.data.loader import Loader as Loader
    from dsframe.data.loader import as_source as as_source
    from dsframe.data.sampler import Sampler as Sampler
    from dsframe.data.sampler import permutation as permutation
    from dsframe.data.source import Batch as Batch
    from dsframe.data.source import ImageSource as ImageSource
    from dsframe.data.source import Source as Source
    from dsframe.data.source import TensorSource as TensorSource
    from dsframe.data.source import draws as draws

_HOMES = {
    "Batch": "source",
    "EvaluationLoader": "loader",
    "ImageSource": "source",
    "Loader": "loader",
    "Pad": "collate",
    "Sampler": "sampler",
    "Source": "source",
    "TensorSource": "source",
    "as_source": "loader",
    "draws": "source",
    "permutation": "sampler",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dsframe.data.{_HOMES[name]}"), name)

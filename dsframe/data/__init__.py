"""Data: sources, the order of samples, and loaders.

``Source`` is what a task may return besides a map-style torch ``Dataset``; ``Loader`` and ``EvaluationLoader`` give one
rank its batches; ``draws`` is randomness that belongs to a sample.
"""

from dsframe.data.loader import EvaluationLoader, Loader, as_source
from dsframe.data.sampler import Sampler, evaluation_rows, permutation
from dsframe.data.source import Batch, ImageSource, Source, TensorSource, draws

__all__ = [
    "Batch",
    "EvaluationLoader",
    "ImageSource",
    "Loader",
    "Sampler",
    "Source",
    "TensorSource",
    "as_source",
    "draws",
    "evaluation_rows",
    "permutation",
]

"""Data: sources, the order of samples, and loaders.

A task may return a ``Source`` instead of a map-style torch ``Dataset``; ``Loader`` and ``EvaluationLoader`` yield one
rank's batches; ``draws`` gives random numbers that belong to a sample.
"""

from dsframe.data.collate import Pad as Pad
from dsframe.data.datasets import as_source as as_source
from dsframe.data.loader import EvaluationLoader as EvaluationLoader
from dsframe.data.loader import Loader as Loader
from dsframe.data.sampler import Sampler as Sampler
from dsframe.data.sampler import permutation as permutation
from dsframe.data.source import Batch as Batch
from dsframe.data.source import ImageSource as ImageSource
from dsframe.data.source import Source as Source
from dsframe.data.source import TensorSource as TensorSource
from dsframe.data.source import draws as draws

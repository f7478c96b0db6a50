"""``dsframe.train`` that evaluates 64 samples, for tests of what training computes.

    python -m tests.engines.briefly --config FILE ...

An evaluation of all images of Fashion-MNIST takes as long as the training of such a test.
"""

from __future__ import annotations

import runpy
from typing import Any
from unittest import mock

from torch import Tensor

from dsframe.data.loader import EvaluationLoader, as_source

SAMPLES = 64


class First:
    """The first samples of a source."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return min(SAMPLES, len(self._source))

    def batch(self, indices: Tensor, epoch: int) -> Any:
        return self._source.batch(indices, epoch)


if __name__ == "__main__":
    full = EvaluationLoader.__init__

    def brief(self: EvaluationLoader, data: Any, *, seed: int, **more: Any) -> None:
        full(self, First(as_source(data, seed)), seed=seed, **more)

    with mock.patch.object(EvaluationLoader, "__init__", brief):
        runpy.run_module("dsframe.train", run_name="__main__", alter_sys=True)

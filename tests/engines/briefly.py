"""``dsframe.train`` that evaluates 64 samples, for tests of what training computes.

    python -m tests.engines.briefly --config FILE ...

An evaluation of all images of Fashion-MNIST takes as long as the training of such a test.
"""

import runpy
from unittest import mock

from dsframe.data.loader import EvaluationLoader, as_source

SAMPLES = 64


class First:
    """The first samples of a source."""

    def __init__(self, source):
        self._source = source

    def __len__(self):
        return min(SAMPLES, len(self._source))

    def batch(self, indices, epoch):
        return self._source.batch(indices, epoch)


if __name__ == "__main__":
    full = EvaluationLoader.__init__

    def brief(self, data, *, seed, **more):
        full(self, First(as_source(data, seed)), seed=seed, **more)

    with mock.patch.object(EvaluationLoader, "__init__", brief):
        runpy.run_module("dsframe.train", run_name="__main__", alter_sys=True)

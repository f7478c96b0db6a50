"""Models and losses that keep something from step to step; a step takes ``STEP_SECONDS``, from the third one on."""

import os
import time

from torch import nn

from dsframe.run_dir.outcome import reporter
from tests.engines import foreign_tasks


class _Slow(foreign_tasks.Rows):
    def loss(self, outputs, targets):
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")) if reporter().step > 1 else 0.0)
        return super().loss(outputs, targets)


class Centre(_Slow, foreign_tasks.ModelCentre):
    """The loss moves a buffer of the model, by the rows of all ranks."""


class Codebook(_Slow, foreign_tasks.Codebook):
    """The model's own collectives follow the codes of all ranks."""


class Limited(_Slow, foreign_tasks.MaxNorm):
    """An embedding writes to its weights."""


class Dropping(_Slow):
    """Draws random numbers, and keeps the statistics of each rank's rows."""

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))

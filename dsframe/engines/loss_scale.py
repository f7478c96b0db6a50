"""Loss scaling, which keeps fp16 gradients in range."""

from __future__ import annotations

from dsframe.config.schema.precision import Fp16
from dsframe.errors import TrainingError
from dsframe.model.state import LossScaleState


class LossScale:
    """Dynamic or static loss scaling with DeepSpeed's meaning of the ``fp16`` section's keys.

    Source: deepspeed 0.19.8, ``runtime/fp16/loss_scaler.py`` (DynamicLossScaler).
    """

    def __init__(self, wanted: Fp16) -> None:
        """``wanted.loss_scale`` 0: dynamic, starting at 2 ** ``initial_scale_power``; otherwise that fixed factor."""
        self._wanted = wanted
        self.dynamic = wanted.loss_scale == 0
        self.scale = float(2**wanted.initial_scale_power) if self.dynamic else wanted.loss_scale
        self._left = wanted.hysteresis
        self._steps = 0
        self._last_overflow = -1

    @property
    def state(self) -> LossScaleState | None:
        """Returns the state for a checkpoint; None for a fixed factor."""
        return LossScaleState(self.scale, self._left, self._steps, self._last_overflow) if self.dynamic else None

    def restore(self, saved: LossScaleState | None) -> None:
        """Continues from a checkpoint; without a state (no fp16 run) keeps the file's initial factor."""
        if self.dynamic and saved is not None:
            self.scale, self._left = saved.scale, saved.hysteresis_left
            self._steps, self._last_overflow = saved.steps, saved.last_overflow

    def update(self, overflow: bool) -> None:
        """Called after each step: halves the factor after overflows (``hysteresis``), doubles it after a window
        without.

        Raises TrainingError if an overflow occurs at the lowest factor.
        """
        if not self.dynamic:
            return
        wanted = self._wanted
        if overflow:
            if self._left == 1:
                if self.scale <= wanted.min_loss_scale:
                    raise TrainingError(f"fp16 gradients overflow at the lowest loss scale, {self.scale:g}; try bf16")
                self.scale = max(self.scale / 2, wanted.min_loss_scale)
            else:
                self._left -= 1
            self._last_overflow = self._steps
        else:
            if wanted.consecutive_hysteresis:
                self._left = wanted.hysteresis
            stable = self._steps - self._last_overflow - 1
            if stable > 0 and stable % wanted.loss_scale_window == 0:
                if not wanted.consecutive_hysteresis:
                    self._left = wanted.hysteresis
                self.scale *= 2
        self._steps += 1

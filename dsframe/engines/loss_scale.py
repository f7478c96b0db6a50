"""How fp16 gradients are kept in range: the factor on the loss."""

from __future__ import annotations

from dsframe.errors import TrainingError
from dsframe.model.state import LossScaleState


class LossScale:
    """Dynamic or static loss scaling with DeepSpeed's meaning of the ``fp16`` section's keys.

    Source: deepspeed 0.19.8, ``runtime/fp16/loss_scaler.py`` (DynamicLossScaler).
    """

    def __init__(
        self,
        *,
        loss_scale: float = 0.0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> None:
        """``loss_scale`` 0: dynamic, from 2 ** ``initial_scale_power``; otherwise that fixed factor."""
        self.dynamic = loss_scale == 0
        self.scale = float(2**initial_scale_power) if self.dynamic else loss_scale
        self.window = loss_scale_window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.minimum = min_loss_scale
        self._left = hysteresis
        self._steps = 0
        self._last_overflow = -1

    @property
    def state(self) -> LossScaleState | None:
        """Returns the state for a checkpoint; None for a fixed factor."""
        return LossScaleState(self.scale, self._left, self._steps, self._last_overflow) if self.dynamic else None

    def restore(self, saved: LossScaleState | None) -> None:
        """Continues from a checkpoint; without one (it was not an fp16 run) from the file's first factor."""
        if self.dynamic and saved is not None:
            self.scale, self._left = saved.scale, saved.hysteresis_left
            self._steps, self._last_overflow = saved.steps, saved.last_overflow

    def update(self, overflow: bool) -> None:
        """Called after each step: halves the factor when overflows have used up the hysteresis, doubles it after a window without.

        Raises TrainingError where an overflow comes at the lowest factor.
        """
        if not self.dynamic:
            return
        if overflow:
            if self._left == 1:
                if self.scale <= self.minimum:
                    raise TrainingError(f"fp16 gradients overflow at the lowest loss scale, {self.scale:g}; try bf16")
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self._left -= 1
            self._last_overflow = self._steps
        else:
            if self.consecutive_hysteresis:
                self._left = self.hysteresis
            stable = self._steps - self._last_overflow - 1
            if stable > 0 and stable % self.window == 0:
                if not self.consecutive_hysteresis:
                    self._left = self.hysteresis
                self.scale *= 2
        self._steps += 1

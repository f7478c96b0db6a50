"""Loggers and timers.

Source: ``deepspeed/monitor/config.py`` and ``utils/config.py`` of DeepSpeed 0.19.8.
"""

from dsframe.config.schema.base import Coerced, Unmodelled


class TensorBoard(Coerced):
    """Event files for TensorBoard, written by rank 0. Needs the package ``tensorboard``."""

    enabled: bool = False
    """Turns it on."""
    output_path: str = ""
    """Folder. Default: one in the run directory."""
    job_name: str = "DeepSpeedJobName"
    """Folder inside ``output_path``, if that is set."""


class Wandb(Coerced):
    """Weights & Biases. Needs the package ``wandb``."""

    enabled: bool = False
    """Turns it on."""
    group: str | None = None
    """Group of runs."""
    team: str | None = None
    """Team (entity)."""
    project: str = "deepspeed"
    """Project."""


class Timers(Unmodelled):
    """Timers of DeepSpeed's engine."""

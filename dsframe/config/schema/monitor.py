"""What is logged and where: monitors, profilers and timers.

Source: ``deepspeed/monitor/config.py``, ``profiling/config.py``, ``comm/config.py`` and ``utils/config.py`` of
DeepSpeed 0.19.8.
"""

from dsframe.config.schema.base import Coerced, Unmodelled


class TensorBoard(Coerced):
    """Event files for TensorBoard, written by rank 0. Needs the package ``tensorboard``."""

    enabled: bool = False
    """Turns it on."""
    output_path: str = ""
    """Folder. Default: one in the run's directory."""
    job_name: str = "DeepSpeedJobName"
    """Folder inside ``output_path``, where that is named."""


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


class CsvMonitor(Coerced):
    """One CSV file for each metric, written by rank 0."""

    enabled: bool = False
    """Turns it on."""
    output_path: str = ""
    """Folder. Default: one in the run's directory."""
    job_name: str = "DeepSpeedJobName"
    """Folder inside ``output_path``, where that is named."""


class Comet(Coerced):
    """Comet. Needs the package ``comet_ml``."""

    enabled: bool = False
    """Turns it on."""
    samples_log_interval: int = 100
    """Samples between two submissions."""
    project: str | None = None
    """Project. Default: Comet's own settings."""
    workspace: str | None = None
    """Workspace. Default: Comet's own settings."""
    api_key: str | None = None
    """Key of the account. Better in the environment (COMET_API_KEY) than in a file. dsframe keeps and prints it nowhere."""
    experiment_name: str | None = None
    """Name of the experiment."""
    experiment_key: str | None = None
    """Key of the experiment: 32 to 50 letters and digits."""
    online: bool | None = None
    """Send to the server (default), else store locally."""
    mode: str | None = None
    """``get``, ``create`` or ``get_or_create``."""


class Timers(Unmodelled):
    """Timers of DeepSpeed's engine."""

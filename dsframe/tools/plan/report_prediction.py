"""What a finished run was predicted to take, by its directory, next to what it took."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsframe.config import load
from dsframe.run_dir.record import CONFIG
from dsframe.text import reason


def predicted(directory: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Memory of the fullest rank.

    ``summary``: of the run. What cannot be planned says why instead, as ``problem``: a script's own
    task, data or a module that are gone, a model that needs numbers.
    """
    if task := summary.get("script_task"):
        return {"problem": f"the task {task} is a script's own, which this command cannot build"}
    try:
        config = (directory / CONFIG).stat()
        if config.st_uid != os.getuid() or not stat.S_ISREG(config.st_mode):
            return {"problem": f"{CONFIG} is another user's, and a prediction runs the code that it names"}
        return _predicted(directory, summary)
    except Exception as error:  # the user's modules are run here; the page is written all the same
        return {"problem": reason(error, 200)}


def _predicted(directory: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    from dsframe import tasks
    from dsframe.tools.plan.device import unlimited
    from dsframe.tools.plan.footprint import predict
    from dsframe.tools.plan.model import traced

    config = load(directory / CONFIG)
    model = traced(config, tasks.build(config.settings.task, config.settings.seed))
    device = unlimited(on_cpu=summary["device"] != "cuda")
    ranks = summary["training_processes"]
    prediction = predict(config, summary["engine"], model, device, ranks)
    return {"memory_bytes": round(prediction.memory.total + summary["base_bytes"])}


def format_prediction(summary: Mapping[str, Any], guess: Mapping[str, Any]) -> str:
    """Prediction and measurement in one line."""
    if "problem" in guess:
        return f"no prediction: {guess['problem']}"
    error = max(summary["peak_memory_bytes"]) / guess["memory_bytes"] - 1
    return f"predicted: {guess['memory_bytes'] / 2**20:,.0f} MiB a rank ({error:+.0%} measured)"

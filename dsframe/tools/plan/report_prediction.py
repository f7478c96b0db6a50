"""What a finished run was predicted to take, from its directory, to be put beside what it took."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsframe.config import load
from dsframe.run_dir.record import CONFIG, read_origin
from dsframe.text import reason
from dsframe.tools.plan import hardware as machines

if TYPE_CHECKING:
    from dsframe.config import Config


def predicted(directory: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Memory of the fullest rank, bytes it sends in a step and, where the machine is known, seconds of a step.

    ``summary``: of the run. What cannot be planned says why instead, as ``problem``: a script's own task, which only the
    script can make; data or a module that are not there any more; a model that needs numbers.
    """
    if task := summary.get("script_task"):
        return {"problem": f"the task {task} is a script's own, which this command cannot build"}
    if "base_bytes" not in summary:
        return {"problem": "the run was made by an earlier version of dsframe"}
    try:
        config = (directory / CONFIG).stat()
        if config.st_uid != os.getuid() or not stat.S_ISREG(config.st_mode):
            return {"problem": f"{CONFIG} is another user's, and a prediction runs the code that it names"}
        return _predicted(directory, summary)
    except Exception as error:  # the user's own modules are run here: the page is written all the same
        return {"problem": reason(error, 200)}


def _predicted(directory: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    from dsframe import tasks
    from dsframe.tools.plan.predict import predict
    from dsframe.tools.plan.trace import traced

    config = load(directory / CONFIG)
    machine = machine_of(config, read_origin(directory).get("gpus", []) if summary["device"] == "cuda" else None)
    model = traced(config, tasks.build(config.settings.task, config.settings.seed))
    found = predict(config, summary["engine"], model, machine, summary["training_processes"])
    memory, known = found.memory, machine.name != machines.UNKNOWN
    return {
        "memory_bytes": round(memory.peak - memory.reserved + summary["base_bytes"]),
        "base_bytes": summary["base_bytes"],
        "setup_bytes": round(memory.setup - memory.reserved + summary["base_bytes"]),
        "states_bytes": round(memory.states),
        "activation_bytes": round(memory.activations),
        "buffer_bytes": round(memory.buffers),
        "sent_bytes_per_step": {name: round(size) for name, size in found.sent.items()},
        "flops_per_step": round(found.flops),
        "seconds_per_step": found.seconds.step if known else None,
        "communication_seconds_per_step": found.seconds.collectives if known else None,
        "hardware": machine.name,
    }


def machine_of(config: Config, gpus: list[str] | None) -> machines.Hardware:
    """As the file says (``dsframe.hardware``), else by the GPU's name; else one whose times mean nothing.

    ``gpus``: the names of the run's; None on CPUs.
    """
    if config.settings.hardware:
        return machines.find(config.settings.hardware)
    if gpus is None:
        return machines.unknown(on_gpu=False)
    return (machines.of_gpu(gpus[0]) if gpus else None) or machines.unknown(on_gpu=True)


def format_prediction(summary: Mapping[str, Any], guess: Mapping[str, Any]) -> str:
    """Prediction and measurement in one line."""
    if "problem" in guess:
        return f"no prediction: {guess['problem']}"
    peak = max(summary["peak_memory_bytes"])
    parts = [f"{guess['memory_bytes'] / 2**20:,.0f} MiB a rank ({peak / guess['memory_bytes'] - 1:+.0%} measured)"]
    seconds = guess["seconds_per_step"]
    if seconds and summary["rate"]:
        step = summary["units_per_step"] / summary["rate"]
        parts.append(f"{seconds * 1e3:,.4g} ms a step ({step / seconds - 1:+.0%} measured)")
    sent = sum(guess["sent_bytes_per_step"].values())
    return f"predicted: {', '.join(parts)}, {sent / 1e6:,.4g} MB sent a step and rank"

"""One small training, for hosts that share this machine."""

from __future__ import annotations

import json
from pathlib import Path

from dsframe.run_dir.record import read_metrics

STEPS = 10
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.002}},
    "zero_optimization": {"stage": 1},
    "dsframe": {
        "task": {"name": "language", "layers": 1, "width": 32, "context": 32, "corpus": "synthetic", "samples": 300},
        "steps": STEPS,
        "log_every_steps": 1,
        "threads_per_rank": 1,
    },
}


def write(folder: Path, **settings: object) -> Path:
    """The training's file; ``settings`` go into its dsframe section."""
    path = folder / "small.json"
    path.write_text(json.dumps(CONFIG | {"dsframe": CONFIG["dsframe"] | settings}))  # type: ignore[operator]
    return path


def losses(run_dir: Path) -> list[float]:
    """By step."""
    return [record["loss"] for record in read_metrics(run_dir) if "loss" in record]

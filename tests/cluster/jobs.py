"""One small training, for hosts that share this machine."""

from dsframe.run_dir.record import read_metrics
from tests import kept
from tests.files import ds_config, write_json

STEPS = 10
CONFIG = ds_config(
    8,
    "AdamW",
    0.002,
    sections={"zero_optimization": {"stage": 1}},
    task={"name": "language", "layers": 1, "width": 32, "context": 32, "corpus": "synthetic", "samples": 300},
    steps=STEPS,
    log_every_steps=1,
    threads_per_rank=1,
)


def write(folder, **settings):
    """The training's file; ``settings`` go into its dsframe section."""
    path = folder / "small.json"
    write_json(path, CONFIG | {"dsframe": CONFIG["dsframe"] | settings})
    return path


def losses(run_dir):
    """By step."""
    return [record["loss"] for record in read_metrics(run_dir) if "loss" in record]


def alone(folder):
    """The losses of the training in this folder on one process."""
    kept.run(folder, ["--config", "small.json", "--run-dir", "alone", "--engine", "single"], 1).check()
    return losses(folder / "alone")

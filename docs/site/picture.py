"""Draws docs/images/one_file_two_engines.svg from two runs of one file.

    dsframe launch --config examples/first_run/config.json -np 2 --engine deepspeed --set zero_optimization.stage=3 \
        --set dsframe.log_every_steps=5 --run-dir runs/deepspeed        # and --engine horovod, runs/horovod
    python docs/site/picture.py runs/deepspeed runs/horovod
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from dsframe.run_dir.record import read_metrics

TARGET = Path(__file__).resolve().parents[1] / "images" / "one_file_two_engines.svg"


def curve(run: str) -> dict[int, float]:
    """Returns a run's training loss by step."""
    return {line["step"]: line["loss"] for line in read_metrics(Path(run)) if line.get("loss") is not None}


def main() -> None:
    """Draws the losses, and below them their difference."""
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "dsframe", "font.family": "sans-serif", "font.size": 11}
    )
    first, second = (curve(run) for run in sys.argv[1:3])
    steps = sorted(set(first) & set(second))
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot(
        steps, [first[step] for step in steps], color="#3f51b5", linewidth=4, alpha=0.45, label="DeepSpeed, ZeRO-3"
    )
    above.plot(steps, [second[step] for step in steps], color="#d84315", linewidth=1.2, label="Horovod")
    above.set_ylabel("loss")
    above.set_title("One file, two engines: a CNN on Fashion-MNIST, two processes", fontsize=11, loc="left")
    above.legend(frameon=False)
    differences = [max(abs(first[step] - second[step]), 1e-9) for step in steps]
    below.semilogy(steps, differences, color="#555555", linewidth=1)
    below.set_ylabel("difference")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(TARGET, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()

"""Test accuracy after the same epochs, with the switches for speed and without, seed by seed.

    python -m benchmarks.accuracy                                # bf16 autocast, channels last, compiled: Fashion-MNIST, 2 epochs
    python -m benchmarks.accuracy --epochs 5 --seeds 1,2,3,4,5

The file is ``ds_configs/zero3.json`` on DDP, two processes, one thread each; nothing but the switches and the seed changes. The
difference of a seed is its accuracy with the switches less that without. Fails where the mean difference is further below zero than
twice its own standard error and half a percent.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import heed_sigterm
from benchmarks.startup import REPOSITORY
from dsframe.run_dir.record import read_summary
from dsframe.tools import subprocess_runs

SWITCHES = {
    "bf16": ("torch_autocast.enabled=true", "torch_autocast.dtype=bfloat16"),
    "channels_last": ("dsframe.model.channels_last=true",),
    "compile": ("dsframe.model.compile=true",),
}
BELOW = 0.005
"""Of accuracy: two engines that round differently end 0.002 apart (``make train``)."""


def train(folder, name, overrides):
    """The summary of a training."""
    print(f"training {name}", file=sys.stderr, flush=True)
    subprocess_runs.train(REPOSITORY / "ds_configs" / "zero3.json", 2, folder / name, engine="ddp", overrides=overrides)
    return read_summary(folder / name)


def main(arguments=None):
    """Prints the table; 1 where the switches cost accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--seeds", default="1,2,3", help="(default: %(default)s)")
    parser.add_argument("--switches", default=",".join(SWITCHES), help="some of them (default: %(default)s)")
    options = parser.parse_args(arguments)
    heed_sigterm()
    os.environ["OMP_NUM_THREADS"] = "1"
    on = [override for switch in options.switches.split(",") for override in SWITCHES[switch]]
    steps = options.epochs * 60_000 // 128
    same = (
        f"dsframe.epochs={options.epochs}",
        f"scheduler.params.total_num_steps={steps}",
        "dsframe.log_every_steps=100",
    )
    differences, ratios = [], []
    print(
        f"{'seed':>4} {'without':>9} {'with':>9} {'samples/s':>10} {'with':>9}  switches: {options.switches}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="dsframe-accuracy-") as name:
        for seed in options.seeds.split(","):
            own = (*same, f"dsframe.seed={seed}")
            plain, fast = train(Path(name), f"plain-{seed}", own), train(Path(name), f"fast-{seed}", (*own, *on))
            before, after = (run["metrics"]["accuracy"] for run in (plain, fast))
            differences.append(after - before)
            ratios.append(fast["rate"] / plain["rate"])
            print(f"{seed:>4} {before:9.4f} {after:9.4f} {plain['rate']:10,.0f} {fast['rate']:9,.0f}", flush=True)
    mean, speed = statistics.mean(differences), f"{statistics.median(ratios):.2f} times the speed, evaluations left out"
    if len(differences) == 1:
        print(f"difference {mean:+.4f}, of which one seed does not say what chance is; {speed}")
        return 0
    error = statistics.stdev(differences) / len(differences) ** 0.5
    print(f"difference {mean:+.4f} +- {error:.4f}; {speed}")
    return int(mean < -max(BELOW, 2 * error))


if __name__ == "__main__":
    sys.exit(main())

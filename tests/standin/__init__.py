"""A strict stand-in for GPUs: a CPU build of torch with devices named "cuda", for tests of the code that only runs on them.

    folder = tmp_path / "records"
    run_ranks(warm(2, ["-m", "tests.standin.train", str(folder), "--config", "zero3.json"], standin=True), timeout_seconds=99)

It refuses what a GPU refuses: tensors of host and device in one operation, a tensor of the host in a collective, a device number
that is not there, a host that reads device memory (segmentation fault), more memory than the limit. It records, with the line that
did it: each wait of the host for the device, each copy between the two, bytes live and at peak. A non-blocking copy to the host
arrives when the host has waited; before, its target holds NaN.

What it does not see: a missing wait between streams (its kernels are synchronous), NCCL's order and hangs, operators and number
formats that CUDA lacks, TF32, CUDA graphs, compiled kernels, speed.

``device/`` is the extension in C++, ``switch_on.py`` what torch's Python modules need, ``site/`` switches it on.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.standin import build

SITE = Path(__file__).with_name("site")


def environment():
    """The variables that switch the stand-in on in a process and in those that it starts: two devices at first."""
    return {
        "DSFRAME_STANDIN": str(build.build()),
        "DS_ACCELERATOR": "cuda",  # a test before may have trained on the CPU in this process, and DeepSpeed's choice stays
        "PYTHONPATH": os.pathsep.join([str(SITE), str(SITE.parents[2])]),
    }

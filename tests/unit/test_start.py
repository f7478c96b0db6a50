"""What a rank imports before its first step: no more than the file needs, in time, files and memory."""

import sys

from tests.processes import run_program

MEASURE = """
import os, re
def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1]) / 1024
import torch, torch.distributed
before = resident()
import dsframe.train, dsframe.run
from dsframe import hooks, job, tasks
from dsframe.engines import torch_patches
from dsframe.host import numerics
print(resident() - before)
"""


def test_a_ranks_imports_take_little_memory_beside_torch():
    """Everything that comes before the engine; 13.9 MiB of its own measured, most of it the configuration's pydantic. Files that
    are mapped count more or less as the system has them in memory, for all ranks."""
    done = run_program([sys.executable, "-c", MEASURE])
    assert float(done.stdout) < 15

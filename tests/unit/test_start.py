"""What a rank imports before its first step: no more than the file needs, in time, files and memory."""

import sys
import time

import psutil
import pytest

from dsframe.host import phases
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


def test_phases_make_the_time_since_the_start(monkeypatch):
    monkeypatch.setattr(phases, "_runs", 0)
    phases.begin()
    age = time.time() - psutil.Process().create_time()
    assert phases.seconds()["python"] == pytest.approx(age, abs=1)
    began = time.perf_counter()
    for name in "aba":
        time.sleep(0.1)
        phases.done(name)
    _, first, second = phases.seconds().values()
    assert first > 0.2
    assert first + second == pytest.approx(time.perf_counter() - began, abs=0.05)
    phases.begin()
    assert phases.seconds() == {}

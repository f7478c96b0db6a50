"""What a rank imports before its first step: no more than the file needs, in time, files and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import os, re
def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\\s+(\\d+) kB", status.read())[1]) / 1024
import torch, torch.distributed
before = resident()
import dsframe.train, dsframe.run
from dsframe import hooks, job, tasks
from dsframe.engines import torch_patches
from dsframe.host import numerics
print(resident() - before)
"""


def test_a_ranks_imports_take_little_memory_beside_torch() -> None:
    """Everything that comes before the engine; 16.5 MiB measured, most of it the configuration's pydantic."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < 20


TRAIN = """
import sys
import dsframe.train
assert dsframe.train.main(argv=sys.argv[1:]) == 0
print(*sorted(sys.modules))
"""


@pytest.mark.parametrize("engine", ["single", "deepspeed"])
def test_a_run_imports_no_compiler(engine: str, tmp_path: Path) -> None:
    """torch._dynamo (1.4 s, 71 MiB, 828 modules) and sympy, which it brings, are for files that compile or shard by DTensor."""
    document = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "dsframe": {
            "engine": engine,
            "task": {"name": "vision", "dataset": "synthetic", "samples": 16},
            "steps": 2,
            "eval_samples": 4,
            "run_dir": str(tmp_path / "run"),
        },
    }
    (tmp_path / "file.json").write_text(json.dumps(document))
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, "--config", str(tmp_path / "file.json")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "torch" in loaded
    assert not {"torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor"} & loaded

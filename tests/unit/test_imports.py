"""What starting a run imports: nothing that no training uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LOOK = """
import sys
import dsframe.engines.zero, dsframe.run, dsframe.trainer
from deepspeed.autotuning import autotuner
from deepspeed.runtime.zero.muon import original_muon
import mlflow
heavy = {"torch._inductor", "torch._dynamo", "transformers", "torchvision", "pandas", "matplotlib"}
print(sorted(heavy & set(sys.modules)), autotuner.has_mlflow, original_muon.muon_update.__name__, mlflow.__file__)
"""


def test_deepspeed_comes_without_what_no_training_uses(tmp_path: Path) -> None:
    package = tmp_path / "mlflow"
    package.mkdir()
    (package / "__init__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    found = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, env=environment, timeout=120)
    expected = f"[] False muon_update {package / '__init__.py'}"
    assert found.stdout.strip().splitlines()[-1:] == [expected], found.stderr

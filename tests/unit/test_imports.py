"""What starting a run imports: nothing that no training uses."""

import json
import os
import subprocess
import sys

import pytest

from tests.processes import REPOSITORY, run_program

LOOK = """
import sys
import dsframe.engines.deepspeed.engine, dsframe.run, dsframe.trainer
from dsframe.engines.deepspeed import patches
from deepspeed.autotuning import autotuner
import mlflow
heavy = {"torch._inductor", "transformers", "torchvision", "pandas", "matplotlib"}
print(sorted(heavy & set(sys.modules)), autotuner.has_mlflow, mlflow.__file__)
"""


def test_deepspeed_comes_without_what_no_training_uses(tmp_path):
    package = tmp_path / "mlflow"
    package.mkdir()
    (package / "__init__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    found = run_program([sys.executable, "-c", LOOK], env=environment, check=False)
    expected = f"[] False {package / '__init__.py'}"
    assert found.stdout.strip().splitlines()[-1:] == [expected], found.stderr


ONE_RANK = """
import json, os, sys, warnings
os.environ["DS_ACCELERATOR"] = "cpu"
warnings.simplefilter("ignore")
import deepspeed
brought = set(sys.modules)
from tests.contract import make
file = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": STAGE}}
engine = make(file, "deepspeed")
found = sorted(name for name in set(sys.modules) - brought if name.startswith(("deepspeed.", "dsframe.engines.")))
engine.close()
print(json.dumps([sorted(name for name in brought if name.startswith("deepspeed.")), found]))
"""
FEATURES = ("pipe", "tensor_parallel", "tp_plan", "auto_tp", "sequence")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_run_imports_the_features_that_its_file_has(stage):
    """``import deepspeed`` itself brings the pipeline and AutoTP; a ZeRO optimizer brings Muon."""
    program = ONE_RANK.replace("STAGE", str(stage))
    found = run_program([sys.executable, "-c", program], cwd=REPOSITORY, check=False)
    assert found.returncode == 0, found.stderr
    brought, later = json.loads(found.stdout.strip().splitlines()[-1])
    assert {"deepspeed.runtime.pipe.engine", "deepspeed.module_inject.auto_tp"} <= set(brought)
    own = {
        name.removeprefix("dsframe.engines.deepspeed.")
        for name in later
        if name.startswith("dsframe.engines.deepspeed.")
    }
    core = {
        "engine",
        "forward_hooks",
        "handover",
        "imports",
        "jit",
        "patches",
        "refusals",
        "stage_3",
        "swap",
        "versions",
    }
    assert own == core | {"state", "state_flat"}
    assert [name for name in later if any(feature in name for feature in FEATURES)] == []
    assert ("deepspeed.runtime.zero.muon.original_muon" in later) == (stage > 0)


def test_torch_waits_until_the_number_of_threads_is_settled():
    """It reads OMP_NUM_THREADS and its log level once, when it is imported."""
    program = "import sys, dsframe.run, dsframe.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, timeout=60, check=False).returncode == 0

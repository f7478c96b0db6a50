"""What starting a run imports: nothing that no training uses."""

import os
import subprocess
import sys

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


def test_torch_waits_until_the_number_of_threads_is_settled():
    """It reads OMP_NUM_THREADS and its log level once, when it is imported."""
    program = "import sys, dsframe.run, dsframe.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, timeout=60, check=False).returncode == 0

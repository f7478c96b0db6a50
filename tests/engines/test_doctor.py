"""``dsframe doctor`` on this machine, with the libraries loaded for real."""

import os
import subprocess
import sys

from tests.processes import REPOSITORY


def report(*arguments, **variables):
    path = os.pathsep.join([variables.pop("first_on_path", ""), str(REPOSITORY)]).strip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "dsframe.cli", "doctor", *arguments],
        cwd=variables.get("TMPDIR"),  # away from the files here, which name folders of other runs
        env=os.environ | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_a_working_machine(tmp_path):
    code, lines = report(TORCH_EXTENSIONS_DIR=str(tmp_path), HOME=str(tmp_path), TMPDIR=str(tmp_path))
    text = "\n".join(lines)
    for name in ("torch 2.", "deepspeed 0.", "horovod 0.", "torchvision 0.", "torchrun: "):
        assert f"  ok  {name}" in text, text
    assert code == 0


def test_a_library_that_does_not_load_is_broken(tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('undefined symbol: torch')")
    code, lines = report(first_on_path=str(tmp_path))
    broken = [line for line in lines if line.startswith("  !!  horovod")]
    assert len(broken) == 1
    assert (
        "does not load: ImportError: undefined symbol: torch; compile it as docs/coming_from/horovod.md says"
        in broken[0]
    )
    assert code == 1

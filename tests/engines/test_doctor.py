"""``dsframe doctor`` on this machine, with the libraries loaded for real."""

import os
import sys

from dsframe.tools import doctor
from tests.processes import REPOSITORY, run_program


def test_a_working_machine(tmp_path):
    # Away from files of this machine, which name folders of other runs.
    away = dict.fromkeys(("TORCH_EXTENSIONS_DIR", "HOME", "TMPDIR"), str(tmp_path))
    command = [sys.executable, "-m", "dsframe.cli", "doctor"]
    done = run_program(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | away)
    assert done.stderr == ""
    text = done.stdout
    assert "Traceback" not in text
    for name in ("torch 2.", "deepspeed 0.", "horovod 0.", "torchvision 0.", "torchrun: "):
        assert f"  ok  {name}" in text, text


def test_a_library_that_does_not_load_is_broken(tmp_path, monkeypatch, capsys):
    """Of the others only torch is loaded."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('undefined symbol: torch')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPOSITORY)]))
    monkeypatch.setattr(doctor, "PROBES", doctor.PROBES | dict.fromkeys(("deepspeed", "torchvision"), "print('{}')"))
    assert doctor.main([]) == 1
    (broken,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  !!  horovod")]
    assert (
        "does not load: ImportError: undefined symbol: torch; compile it as docs/coming_from/horovod.md says" in broken
    )

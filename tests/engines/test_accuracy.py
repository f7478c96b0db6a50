"""The main job: the default file trains to 0.90 on Fashion-MNIST's test images on both engines, and the table compares them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsframe.report.compare import table
from dsframe.report.record import read_summary
from tests.processes import deepspeed, horovodrun, run_ranks


@pytest.mark.timeout(1700)
def test_the_default_file_on_both_engines(tmp_path: Path) -> None:
    for name, launch in (("deepspeed", deepspeed), ("horovod", horovodrun)):
        run_ranks(launch(2, ["-m", "dsframe.train", "--run-dir", name]), cwd=tmp_path, timeout_seconds=800).check()
        summary = read_summary(tmp_path / name)
        assert summary["engine"] == name
        assert summary["metrics"]["accuracy"] >= 0.90
    text = table({name: [tmp_path / name] for name in ("deepspeed", "horovod")})
    assert "DeepSpeed ZeRO-3" in text
    assert "Horovod" in text
    for row in ("loss at step 2,344", "evaluation accuracy", "samples/s", "peak memory per rank"):
        assert row in text

"""The main job on both engines, and the table that compares them: two epochs of the default file, which in its five comes to 0.91
(``make train``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsframe.report.compare import table
from dsframe.report.record import read_summary
from tests.processes import deepspeed, horovodrun, run_ranks


@pytest.mark.timeout(900)
def test_the_default_file_on_both_engines(tmp_path: Path) -> None:
    shorter = ["--set", "dsframe.epochs=2", "--set", "scheduler.params.total_num_steps=938"]
    for name, launch in (("deepspeed", deepspeed), ("horovod", horovodrun)):
        command = ["-m", "dsframe.train", "--run-dir", name, *shorter]
        run_ranks(launch(2, command), cwd=tmp_path, timeout_seconds=400).check()
        summary = read_summary(tmp_path / name)
        assert summary["engine"] == name
        assert summary["metrics"]["accuracy"] >= 0.87
    text = table({name: [tmp_path / name] for name in ("deepspeed", "horovod")})
    assert "DeepSpeed ZeRO-3" in text
    assert "Horovod" in text
    for row in ("loss at step 938", "evaluation accuracy", "samples/s", "peak memory per rank"):
        assert row in text

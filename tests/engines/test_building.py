"""Where models of sharded engines are built: said at start; a disk without room is an error on every rank, before training."""

import shutil
import tempfile
from pathlib import Path

import pytest

from dsframe.model.spill import is_disk
from tests.files import ds_config, write_json
from tests.processes import run_ranks, warm

WIDTH = 2900
"""Of layers that are barely large enough together to be built in files."""
ZERO = {"zero_optimization": {"stage": 3}}


def train(folder, engine, spill, *, run_dir=None, **options):
    """Two ranks, one step."""
    file = ds_config(
        2,
        "AdamW",
        0.1,
        sections=dict(ZERO if engine == "deepspeed" else {}),
        engine=engine,
        steps=1,
        run_dir=str(run_dir or folder / "run"),
        checkpoints={"at_end": False},
        task={"name": "tests.engines.building:Wide", "options": options},
    )
    write_json(folder / "file.json", file)
    command = ["-m", "dsframe.train", "--config", str(folder / "file.json")]
    return run_ranks(warm(2, command), cwd=folder, timeout_seconds=120, env={"TMPDIR": str(spill)})


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_a_full_disk_of_one_rank_is_an_error_on_all(engine, tmp_path):
    spill = tmp_path / "spill"
    spill.mkdir()
    if not is_disk(spill):
        pytest.skip("the temporary folder lies in memory")
    finished = train(tmp_path, engine, spill, full_on=1)
    assert finished.returncode != 0
    told = finished.output
    assert f"{spill}: no room for the model: File too large, 64 MiB more are needed" in told
    assert "the model could not be built: rank 1: " in told  # what rank 0 says
    assert "Traceback" not in told
    assert list(spill.iterdir()) == []
    assert "step 1" not in told


def test_where_it_is_built_is_said(tmp_path):
    """A folder in memory is passed over for one on a disk; where there is none, what follows is said."""
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="dsframe-test-"))
    try:
        if is_disk(tmp_path):
            finished = train(tmp_path, "fsdp", memory, width=WIDTH).check()
            assert f"the model is built in files of {tmp_path / 'run'}, whole in no rank's memory" in finished.stderr
            assert not list((tmp_path / "run").glob(".building*"))
        finished = train(tmp_path, "fsdp", memory, run_dir=memory / "run", width=WIDTH).check()
        expected = f"the model is built in memory, whole on each rank: {memory} and {memory / 'run'} are not on a disk"
        assert expected in finished.stderr
    finally:
        shutil.rmtree(memory)

"""DeepSpeed's files from strangers: nothing in them is run, nothing outside the folder is read, what is missing is named."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dsframe.config import load
from dsframe.errors import CheckpointError
from dsframe.tools import deepspeed_files, import_deepspeed


class Hostile:
    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call[0], self.call[1:]


def harm(path: str) -> None:
    Path(path).touch()


def test_nothing_that_is_pickled_runs(here: Path) -> None:
    torch.save({"weights": torch.ones(3), "config": Hostile(harm, "harm-was-done")}, "file.pt")
    found = deepspeed_files.load(Path("file.pt"))
    assert found["weights"].tolist() == [1, 1, 1]
    assert isinstance(found["config"], deepspeed_files.Inert)
    torch.save({"config": Hostile(os.system, "touch harm-was-done")}, "file.pt")
    with pytest.raises(CheckpointError, match=r"file\.pt cannot be read: .*system"):
        deepspeed_files.load(Path("file.pt"))
    assert not Path("harm-was-done").exists()


@pytest.mark.parametrize("tag", ["../other", "/etc", "..", "", "."])
def test_a_tag_stays_in_its_folder(tmp_path: Path, tag: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "run" / "latest").write_text(tag)
    for asked in (tag, None):
        with pytest.raises(CheckpointError, match="is not the name of a folder"):
            deepspeed_files.find(tmp_path / "run", asked)


def test_what_is_missing_or_not_known_is_named(tmp_path: Path) -> None:
    def wrong(pattern: str) -> None:
        with pytest.raises(CheckpointError, match=pattern):
            deepspeed_files.read(deepspeed_files.find(tmp_path, None))

    wrong("has no file named latest")
    (tmp_path / "latest").write_text("step5\n")
    wrong("step5 does not exist")
    folder = tmp_path / "step5"
    folder.mkdir()
    wrong("has no mp_rank_00_model_states")
    main = folder / "mp_rank_00_model_states.pt"
    main.write_bytes(b"\x80\x04 no checkpoint")
    wrong("cannot be read")
    states = {
        "dp_world_size": 2,
        "optimizer": None,
        "global_steps": 5,
        "skipped_steps": 0,
        "module": {},
        "param_shapes": [],
    }
    torch.save(states, main)
    wrong("has no optimizer state")
    torch.save({"optimizer_state_dict": {}}, folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    wrong("has the optimizer files of 1 ranks, but 2 ranks wrote it")
    for name, what in (
        ("zero", "universal"),
        ("mp_rank_01_model_states.pt", "tensor-parallel"),
        ("layer_00-model_00-model_states.pt", "belongs to a pipeline"),
    ):
        (folder / name).touch()
        wrong(what)
        (folder / name).unlink()


def test_padding_is_no_weight() -> None:
    """Two ranks' shares of three numbers."""
    flats = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])
    states = [{"state": {0: {"step": torch.tensor(1.0), "exp_avg": 2 * flat}}} for flat in flats]
    each = [{"fp32_flat_groups": [f], "optimizer_state_dict": s} for f, s in zip(flats, states, strict=True)]
    saved: Any = SimpleNamespace(optimizers=each, shapes={"weight": (3,)}, path=Path())
    (found,) = deepspeed_files._stage_3(saved, {}, {})
    assert (found.weight.tolist(), found.moments["exp_avg"].tolist()) == ([1, 2, 3], [2, 4, 6])


def test_a_tag_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"global_step\xff")
    with pytest.raises(CheckpointError, match="global_step� does not exist"):
        import_deepspeed.convert(tmp_path, None, load({"train_batch_size": 8}), Mock(), tmp_path / "run")


def test_updates_are_steps_that_were_not_skipped(tmp_path: Path) -> None:
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": []}]}
    states = {"dp_world_size": 1, "optimizer": optimizer, "module": {}, "global_steps": 5, "skipped_steps": 2}
    torch.save(states, tmp_path / "mp_rank_00_model_states.pt")
    found = deepspeed_files.read(tmp_path)
    assert (found.step, found.updates) == (5, 3)

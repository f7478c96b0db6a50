"""A process that trains twice, as a notebook or a search over settings does, meets its peers anew each time."""

from __future__ import annotations

from pathlib import Path

from tests.processes import horovodrun, run_ranks, torchrun


def test_several_trainings_in_one_process(tmp_path: Path) -> None:
    trainings = ["ddp", "deepspeed:1", "fsdp", "deepspeed:3", "ddp"]
    command = torchrun(2, ["-m", "tests.engines.again", *trainings])
    assert "5 trainings, one loss" in run_ranks(command, timeout_seconds=120, cwd=tmp_path).check().stdout


def test_under_horovodrun(tmp_path: Path) -> None:
    """Where rank 0 says in horovodrun's own store where to meet: its word of the first time is still there at the second.

    And Horovod itself starts again, with other buckets, and would crash if all of its numbers were fixed."""
    command = horovodrun(2, ["-m", "tests.engines.again", "ddp", "horovod", "ddp", "horovod"])
    assert "4 trainings, one loss" in run_ranks(command, timeout_seconds=120, cwd=tmp_path).check().stdout


def test_horovod_finds_no_addresses_of_the_training_before(tmp_path: Path) -> None:
    run_ranks(horovodrun(2, ["-m", "tests.engines.again", "60"]), timeout_seconds=120, cwd=tmp_path).check()

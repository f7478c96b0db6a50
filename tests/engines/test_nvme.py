"""Checkpoints of states on NVMe. What tests first may compile DeepSpeed's op, so these come first of all (tests/conftest.py)."""

import pytest

from tests.engines.test_forms import forms
from tests.engines.test_round_trips import configuration, round_trips
from tests.files import zero
from tests.processes import COMPILING_SECONDS


def on_nvme(folder):
    """Large enough that shares are swapped out: below a megabyte DeepSpeed keeps them in memory."""
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return zero(3, sub_group_size=330_000, offload_optimizer=nvme, offload_param={**nvme, "buffer_size": 1_000_000})


@pytest.mark.timeout(COMPILING_SECONDS + 60)
def test_state_on_nvme_goes_out_and_in_again(tmp_path):
    files = {"nvme": configuration("deepspeed", on_nvme(tmp_path), 800)}
    report = round_trips(tmp_path, 2, files, COMPILING_SECONDS)["nvme"]
    assert report["repeated"] == report["after"]
    assert report["from_the_start"] == report["first"]
    assert report["read_back"] == 0.0
    assert report["scalars"]["middle.weight"] == {"step": 5.0}


@pytest.mark.timeout(COMPILING_SECONDS + 60)
def test_sub_groups_on_nvme_are_saved_one_after_another(tmp_path):
    report = forms(2, configuration("deepspeed", on_nvme(tmp_path), 800), tmp_path, COMPILING_SECONDS)
    assert report["same files"]

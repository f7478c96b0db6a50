"""Checkpoints of states on NVMe. What tests first may compile DeepSpeed's op, so these come first of all (tests/conftest.py)."""

import pytest

from tests.engines.saved import configuration
from tests.engines.test_forms import forms
from tests.files import zero
from tests.processes import COMPILING_SECONDS


def on_nvme(folder):
    """Large enough that shares are swapped out: below a megabyte DeepSpeed keeps them in memory."""
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return zero(3, sub_group_size=330_000, offload_optimizer=nvme, offload_param={**nvme, "buffer_size": 1_000_000})


@pytest.mark.timeout(COMPILING_SECONDS + 60)
def test_sub_groups_on_nvme_are_saved_one_after_another(tmp_path):
    report = forms(2, configuration("deepspeed", on_nvme(tmp_path), 800), tmp_path, COMPILING_SECONDS)
    assert report["same files"]

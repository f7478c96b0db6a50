"""Deterministic algorithms and TF32: what a file asks for holds while it trains, and not afterwards."""

import os
import random
import sys

import numpy as np
import pytest
import torch

import dsframe
from dsframe import run
from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.errors import EngineError, TaskError
from dsframe.host import generators
from dsframe.host.numerics import CUBLAS, chosen
from dsframe.host.restored import at_end, restored
from tests.files import ds_config
from tests.lines import Line


def switches():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(), cuda.matmul.allow_tf32, cudnn.allow_tf32, os.environ.get(CUBLAS),
    )  # fmt: skip


def test_a_run_inside_of_another_restores_its_own(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    hook, ended = sys.excepthook, []
    with restored():
        os.environ.update(KEPT="2", NEW="1")
        sys.excepthook = print
        with restored():
            at_end(ended.append, "inner")
        assert ended == ["inner"]
    assert (os.environ["KEPT"], "NEW" in os.environ, sys.excepthook) == ("1", False, hook)


def test_deterministic_algorithms_hold_inside(monkeypatch):
    monkeypatch.delenv(CUBLAS, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = switches()
    with chosen(deterministic=True, tf32=False):
        assert switches() == (True, False, False, False, *before[4:6], ":4096:8")
    assert switches() == before
    with chosen(deterministic=False, tf32=True):
        assert switches() == before, "there is no GPU"
    monkeypatch.setenv(CUBLAS, ":16:8")
    with chosen(deterministic=True, tf32=False):
        assert os.environ[CUBLAS] == ":16:8", "what the user has set stays"
    assert os.environ[CUBLAS] == ":16:8"


@pytest.mark.parametrize("tf32", [False, True])
def test_products_and_convolutions_are_in_one_format(tf32, monkeypatch):
    """torch's own default has TF32 for convolutions, and not for products."""
    before = switches()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with chosen(deterministic=False, tf32=tf32):
        assert switches()[4:6] == (tf32, tf32)
    assert switches() == before


SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Seen(Line):
    """A model whose loss notes what it was computed with."""

    def __init__(self):
        self.seen = []

    def loss(self, outputs, targets):
        self.seen.append(torch.are_deterministic_algorithms_enabled())
        return super().loss(outputs, targets)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_computes_as_its_file_says(deterministic, here):
    task = Seen()
    section = {"engine": "single", "steps": 2, "run_dir": "run", "deterministic": deterministic}
    run.execute(load(ds_config(4, SGD, **section)), task=task, world=World(), quiet=True)
    assert set(task.seen) == {deterministic}
    assert not torch.are_deterministic_algorithms_enabled()


class Drawn(Seen):
    """Draws, and fails after the number of losses that ``fails`` says."""

    def __init__(self, fails=100):
        super().__init__()
        self.fails = fails

    def model(self):
        return torch.nn.Sequential(super().model(), torch.nn.Dropout())

    def loss(self, outputs, targets):
        self.fails -= 1
        if not self.fails:
            raise KeyError("the user's own")
        return super().loss(outputs, targets) + 0 * (random.random() + np.random.rand())

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.ones(8, 2, dtype=torch.float32), torch.ones(8, 1))


def fitted(task, folder):
    section = {"engine": "single", "steps": 2, "run_dir": str(folder), "threads_per_rank": 1}
    return dsframe.fit(task, ds_config(4, SGD, **section)).loss


def test_a_program_draws_on_where_it_was(tmp_path):
    """A random search in one process: each trial seeds all generators for itself. After an error, too."""
    device, threads = torch.device("cpu"), torch.get_num_threads()
    torch.set_num_threads(3)
    before = generators.capture(device)
    try:
        fitted(Drawn(), tmp_path / "whole")
        assert (generators.capture(device), torch.get_num_threads()) == (before, 3)
        with pytest.raises(KeyError):
            fitted(Drawn(fails=2), tmp_path / "failed")
        assert (generators.capture(device), torch.get_num_threads()) == (before, 3)
    finally:
        torch.set_num_threads(threads)


def test_a_run_trains_as_outside_of_the_callers_modes(tmp_path):
    alone = fitted(Drawn(), tmp_path / "alone")
    modes = (
        torch.no_grad(),
        torch.inference_mode(),
        torch.set_grad_enabled(False),
        torch.autocast("cpu", torch.bfloat16),
    )
    for number, mode in enumerate(modes):
        with mode:
            assert fitted(Drawn(), tmp_path / str(number)) == alone
        torch.set_grad_enabled(True)  # set_grad_enabled holds from the call on


def test_defaults_of_torch_that_a_run_cannot_have_are_refused(tmp_path):
    with torch.device("meta"), pytest.raises(EngineError, match=r"torch's default device is meta, .* call"):
        fitted(Drawn(), tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(TaskError, match="torch's default dtype is float64, and so are new models; return data of"):
            fitted(Drawn(), tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)

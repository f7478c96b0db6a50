"""A loss that cannot train is named in one line, and who ends the process in the middle of a training is no success."""

import sys

import pytest

import dsframe
from dsframe.errors import TaskError
from tests.files import ds_config, write_json
from tests.lines import Line
from tests.processes import REPOSITORY, run_program

FILE = ds_config(4, "Adam", engine="single", steps=2)


class Lossy(Line):
    """With the loss under test."""

    rows = 16

    def __init__(self, kind):
        self._kind = kind

    def loss(self, outputs, targets):
        return self._kind((outputs - targets).square())


KINDS = {
    "int": (lambda errors: 3, "returned int, not a tensor"),
    "None": (lambda errors: None, "returned NoneType, not a tensor"),
    "a vector": (lambda errors: errors, r"returned a tensor of shape \[4, 1\], not a scalar; return its mean"),
    "detached": (
        lambda errors: errors.mean().detach(),
        "returned a tensor without a gradient, so nothing would be trained",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_loss(kind, here):
    loss, message = KINDS[kind]
    with pytest.raises(TaskError, match=rf"Lossy\.loss: {message}"):
        dsframe.fit(Lossy(loss), FILE)


class Evaluated(Lossy):
    def eval_data(self):
        return self.train_data()


def test_what_is_no_loss_in_an_evaluation(here):
    """The evaluation is tried before the first step, so a model of transformers that got no labels ends here."""
    message = r"Evaluated\.loss: returned NoneType, not a tensor; .* compute the loss of outputs\.logits and targets"
    with pytest.raises(TaskError, match=message):
        dsframe.fit(Evaluated(lambda errors: None), FILE)


def test_one_element_is_a_scalar(here):
    assert dsframe.fit(Lossy(lambda errors: errors.mean().reshape(1)), FILE).steps == 2


def test_who_leaves_early_has_not_succeeded(tmp_path):
    code = f"""
import sys, torch, dsframe
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.unit.test_loss_kinds import Lossy
dsframe.main(Lossy(lambda errors: sys.exit(0)), ["--config", "x.json"])
"""
    write_json(tmp_path / "x.json", FILE)
    done = run_program([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert done.returncode == TaskError.exit_code, done.stderr
    assert "sys.exit(0); the training is not complete" in done.stderr
    assert "Traceback" not in done.stderr

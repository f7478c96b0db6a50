"""One file, one training: every engine's losses and weights beside a single process's, by the bounds of tests/equivalence.py.

Each case of at most two processes trains one model here, in turn the CNN and the GPT; ``make equivalence`` trains all of them
with each, those of four and eight processes too, and some with a Llama of Hugging Face, under each engine's own launcher.
"""

import functools
import re

import pytest

from tests import equivalence
from tests.equivalence import CASES
from tests.processes import COMPILING_SECONDS


def row(index, name):
    """A case with one of its models. A case that is not ``in_suite`` waits for ``make test-all``."""
    tasks = [task for task in CASES[name].tasks if task in ("cnn", "gpt")] or CASES[name].tasks
    marks = [pytest.mark.timeout(COMPILING_SECONDS + 60 if "nvme" in name else 900)]
    return pytest.param(
        name, tasks[index % len(tasks)], marks=marks if CASES[name].in_suite else [*marks, pytest.mark.long]
    )


ROWS = [row(index, name) for index, (name, case) in enumerate(CASES.items()) if case.processes <= 2]
reference = functools.cache(functools.partial(equivalence.reference, in_suite=True))


@pytest.mark.parametrize(("name", "task"), ROWS)
def test_same_training(name, task):
    case = CASES[name]
    run, floor = equivalence.train(task, case, in_suite=True), reference(task, case.kernels)
    assert not equivalence.broken_bounds(run, floor, case.kernels)
    assert run.losses[-1] < 0.8 * run.losses[0], "it has learned something: equal losses of nothing prove nothing"


def test_the_command_trains_a_case(monkeypatch, capsys):
    """``make equivalence`` in short: a row of the table, with the references that the tests above have."""
    monkeypatch.setattr(equivalence, "reference", reference)
    monkeypatch.setattr(equivalence, "train", functools.partial(equivalence.train, in_suite=True))
    assert equivalence.main(["--of", "gpt", "--case", "zero3+cpu alone"]) == 0
    assert re.search(r"\nzero3\+cpu alone( +\d\.\de[-+]\d\d){3}  \n", capsys.readouterr().out)


def test_each_bound_is_named():
    assert equivalence.broken((2e-5, 0.0, 1.0), (0.0, 0.0, 1e-6)) == [
        "2.0e-05 in the first 10 steps",
        "weights off by 1.0e+00, more than 3 x 1.0e-06",
    ]

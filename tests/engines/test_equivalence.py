"""One file, one training: every engine's losses and weights beside a single process's, by the bounds of tests/equivalence.py.

Each case of at most two processes trains one model here, in turn the CNN and the GPT; ``make equivalence`` trains all of them
with each, those of four and eight processes too, and some with a Llama of Hugging Face, under each engine's own launcher.
"""

from __future__ import annotations

import functools

import pytest

from tests import equivalence
from tests.equivalence import CASES
from tests.processes import COMPILING_SECONDS, warm

ROWS = [
    (name, tasks[index % len(tasks)])
    for index, (name, case) in enumerate(CASES.items())
    for tasks in [[task for task in case.tasks if task != "llama"]]
    if case.processes <= 2 and case.in_suite
]
reference = functools.cache(functools.partial(equivalence.reference, launcher=warm))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        pytest.param(name, task, marks=pytest.mark.timeout(COMPILING_SECONDS + 60 if "nvme" in name else 900))
        for name, task in ROWS
    ],
)
def test_same_training(name: str, task: str) -> None:
    case = CASES[name]
    run = equivalence.train(task, case, launcher=warm)
    assert not equivalence.broken_bounds(run, reference(task, case.precision), case.precision)
    assert run.losses[-1] < 0.8 * run.losses[0], "it has learned something: equal losses of nothing prove nothing"

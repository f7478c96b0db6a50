"""A few of the kills of ``make kill-test``."""

from types import SimpleNamespace

import pytest

from tests import kill

LONG = pytest.mark.long


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("horovod", marks=LONG), pytest.param("ddp", marks=LONG)])
def test_a_killed_run_ends_as_if_nothing_had_happened(engine):
    """Under ``dsframe launch --restarts``; this seed kills each of the three in a save."""
    number = list(kill.ENGINES).index(engine)
    assert kill.main(["--runs", "1", "--first", f"{number}", "--seed", "3982", "--steps", "40"]) == 0


def test_kills_that_hit_nothing_prove_nothing(monkeypatch, capsys):
    """Two of three have to: a run that ends before its blow is like the undisturbed one."""
    finished = SimpleNamespace(returncode=0, output="", seconds=1.0)
    finished.check = lambda: finished
    left = [0]

    def train(*words, kill=None, **more):
        if kill is not None and left[0]:
            left[0], kill.met = left[0] - 1, "no save under way, newest none"
        return finished

    monkeypatch.setattr(kill, "train", train)
    monkeypatch.setattr(kill, "losses", lambda run_dir: {8: 1.0})
    for hits, wrong in ((0, 1), (1, 1), (2, 0)):
        left[0] = hits
        assert kill.main(["--runs", "3", "--steps", "8"]) == wrong
        assert (f"only {hits} of 3 runs were hit, and 2 have to be" in capsys.readouterr().out) == bool(wrong)

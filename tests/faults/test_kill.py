"""A few of the kills of ``make kill-test``."""

from __future__ import annotations

from tests import kill


def test_a_killed_run_ends_as_if_nothing_had_happened() -> None:
    """DeepSpeed, Horovod and DDP once each, under ``dsframe launch --restarts``."""
    assert kill.main(["--runs", "3", "--first", "3"]) == 0

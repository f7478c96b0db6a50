"""One file, one training: every engine's losses beside a single process's, by the bounds of tests/equivalence.py."""

from __future__ import annotations

import pytest

from tests.equivalence import CASES, EARLY, EARLY_BOUND, NOISE_FACTOR, curve, difference, noise_floor


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], float]:
    return noise_floor()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_same_losses(case: str, reference: tuple[list[float], float]) -> None:
    single, floor = reference
    losses = curve(CASES[case])
    assert difference(single, losses, EARLY) <= EARLY_BOUND
    assert difference(single, losses) <= NOISE_FACTOR * floor
    assert losses[-1] < 0.8 * losses[0], "it has learned something: equal losses of nothing prove nothing"

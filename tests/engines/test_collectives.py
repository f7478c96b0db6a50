"""``dsframe doctor --comm`` with real processes: every transport that is there is measured, one that fails says why."""

from __future__ import annotations

import pytest

from dsframe.tools.collectives import BARRIER, LATENCY_BYTES, SIZES_BYTES, measure


@pytest.mark.parametrize(("transport", "collectives"), [("gloo", 6), ("horovod-gloo", 6)])
def test_measures(transport: str, collectives: int) -> None:
    timings = measure(transport)
    assert not isinstance(timings, str), timings
    assert len(timings) == collectives
    for timing in timings:
        sizes = () if timing.collective == BARRIER else SIZES_BYTES
        assert set(timing.seconds) == {LATENCY_BYTES, *sizes}
        assert all(0 < seconds < 30 for seconds in timing.seconds.values())
        assert len(str(timing).split()) >= 2 + len(sizes)


def test_a_transport_that_is_not_there_says_why() -> None:
    reason = measure("nothing")
    assert isinstance(reason, str)
    assert "nothing" in reason.lower()

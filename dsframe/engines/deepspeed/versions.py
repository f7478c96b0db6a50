"""Which releases of DeepSpeed keep the engines' contract, and which are known not to."""

from __future__ import annotations

import sys

from dsframe.errors import EngineError

HOLDS = ("0.19.8",)
"""The contract (``tests/engines/test_contract.py``) and every patch's test were run with these."""
_EARLIER = (
    "its pipeline cannot be evaluated (no _inference_schedule), its tensor parallelism does not know vocab_parallel_lm_head, and a "
    "process that trains twice keeps dead groups"
)
FAILS = {"0.19.7": _EARLIER, "0.19.6": _EARLIER}
"""Release -> what failed when the same tests were run with it."""


def check(version: str, *, speaks: bool) -> None:
    """Raises EngineError for a release that does not work: it is known, or lacks what dsframe needs. ``speaks``: warns of one that
    nobody has tried."""
    if version in FAILS:
        raise EngineError(f"DeepSpeed {version} does not work here: {FAILS[version]}; install deepspeed=={HOLDS[-1]}")
    if version.partition("+")[0] in HOLDS:
        return
    from dsframe.engines.deepspeed import internals

    internals.check(version)
    if speaks:
        known = ", ".join(HOLDS)
        print(
            f"dsframe: warning: DeepSpeed {version} was never tested with this dsframe, which knows {known}",
            file=sys.stderr,
            flush=True,
        )

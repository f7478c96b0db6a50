"""Tested releases of DeepSpeed."""

from __future__ import annotations

import sys

HOLDS = ("0.19.8",)
"""Releases with which the contract (``tests/engines/test_contract.py``) and every patch's test were run."""


def check(version: str, *, speaks: bool) -> None:
    """Raises EngineError for a release that lacks what dsframe needs. ``speaks``: print a warning for an untested one."""
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

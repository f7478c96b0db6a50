"""The release of DeepSpeed that keeps the engines' contract."""

from __future__ import annotations

import importlib.metadata

from dsframe.errors import EngineError

HOLDS = "0.19.8"
"""The contract (``tests/engines/test_contract.py``) and every patch's test were run with it."""


def check() -> None:
    """Raises EngineError for another release: what it does inside was not found to be the same training."""
    version = importlib.metadata.version("deepspeed")
    if version.partition("+")[0] != HOLDS:
        raise EngineError(
            f"DeepSpeed {version} was not found to train as DeepSpeed {HOLDS} does, which dsframe changes inside; install "
            f"deepspeed=={HOLDS}"
        )

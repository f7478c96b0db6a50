"""A few of the attacks of ``make attack``, one try each."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.attack import ATTACKS
from tests.attack.arena import UntriedError

OFTEN = {"another's run directory", "another's tokenizer", "killed reader", "renames that come late", "clock jumps"}
SEED = 20261123


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.long]) for name in ATTACKS]
)
def test_an_attack_is_survived(name: str, tmp_path: Path) -> None:
    try:
        ATTACKS[name](tmp_path, random.Random(f"{SEED}/{name}/0"))
    except UntriedError as reason:
        pytest.skip(str(reason))

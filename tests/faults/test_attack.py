"""A few of the attacks of ``make attack``, one try each."""

import random

import pytest

from tests.attack import ATTACKS
from tests.attack.arena import UntriedError

OFTEN = {
    "killed rank, restarted on deepspeed",
    "another's run directory",
    "another's tokenizer",
    "killed reader",
    "renames that come late",
    "clock jumps",
}
SEED = 20261123
SHORTER = {"killed rank, restarted on deepspeed": {"kills": 1}}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.long]) for name in ATTACKS]
)
def test_an_attack_is_survived(name, tmp_path):
    try:
        ATTACKS[name](tmp_path, random.Random(f"{SEED}/{name}/0"), **SHORTER.get(name, {}))
    except UntriedError as reason:
        pytest.skip(str(reason))

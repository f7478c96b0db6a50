"""113 public ds_config files: those without a mistake are called so. What the others are refused for, DeepSpeed's own parser
judges in test_config_against_deepspeed.py.

The files are not part of the repository (they have licences of their own). They are expected beside it, in shared/; their
numbers are the first part of their names.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsframe.config.load import examine

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "public_ds_configs"

CLEAN = [
    "001",
    "003",
    "011",
    "023",
    "024",
    "026",
    "034",
    "035",
    "036",
    "045",
    "046",
    "055",
    "056",
    "057",
    "058",
    "059",
    "060",
    "061",
    "062",
    "063",
    "064",
    "065",
    "066",
    "067",
    "068",
    "069",
    "093",
    "094",
    "095",
    "096",
    "097",
    "098",
    "099",
    "100",
    "101",
    "102",
    "105",
    "106",
    "108",
    "110",
    "111",
    "112",
    "114",
    "115",
    "116",
    "117",
    "119",
    "122",
    "124",
    "125",
    "126",
    "128",
    "129",
    "130",
    "131",
    "137",
    "138",
    "139",
    "140",
    "141",
    "170",
    "172",
    "173",
    "174",
    "182",
    "183",
    "184",
    "185",
    "187",
    "207",
    "208",
    "213",
    "220",
    "221",
]
"""No error, no warning."""

# Templates whose placeholders are filled in by a program.
_SIZES = ("E type train_batch_size", "E type train_micro_batch_size_per_gpu", "E type steps_per_print")
_STAGE = ("E type zero_optimization.stage", "E type prescale_gradients")
_BITS = ("E type fp16.enabled", "E type bf16.enabled")
_CURRICULUM = ("E removed curriculum_learning",)


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", files() or [None], ids=lambda path: path.name[:3] if path else "none")
def test_right_files_are_not_called_wrong(path: Path | None) -> None:
    if path is None:
        pytest.skip(f"{FOLDER} is not there: the public files are not part of the repository")
    number = path.name[:3]
    found = [
        problem
        for problem in examine(path.read_text(), number).problems
        if problem.severity != "note" and problem.code != "not-installed"
    ]
    assert (number in CLEAN) == (not found), found
    assert all(problem.line and problem.column and problem.message for problem in found)

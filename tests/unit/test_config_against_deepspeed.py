"""Our verdict beside that of DeepSpeed's own parser, and our schema beside DeepSpeed's own models."""

import copy
import json
import warnings
from pathlib import Path

import pytest

from dsframe.config.load import examine
from dsframe.config.read.reader import ReadError, read

SHARED = Path(__file__).resolve().parents[3] / "shared" / "public_ds_configs"
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

# Where we report an error and DeepSpeed's parser does not, one of these reasons holds.
STRICTER = {
    "unknown-key": "DeepSpeed ignores unknown keys outside its pydantic sections: the file trains something else",
    "misplaced-key": "the same",
    "type": "DeepSpeed does not look at types of plain keys, and fails at the first step; true is no number",
    "range": "DeepSpeed does not look at ranges of plain keys",
    "value": "DeepSpeed looks at names in the engine, after the processes have started",
    "missing": "DeepSpeed finds out in the engine",
    "conflict": "DeepSpeed asserts it in the engine, or ignores one of the two",
    "auto": "no rule resolves it: DeepSpeed fails later",
    "duplicate-key": "DeepSpeed raises when it reads a file, not a dictionary",
    "other-tool": "a file of another tool",
}


@pytest.fixture(scope="module")
def parse():
    """DeepSpeed's parser: the exception it raises for a dictionary, or None."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("DS_ACCELERATOR", "cpu")
        import deepspeed  # noqa: F401
        from deepspeed.runtime.config import DeepSpeedConfig

    def parser(content):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                DeepSpeedConfig(copy.deepcopy(content))
        except Exception as error:
            return error
        return None

    return parser


def public():
    return sorted(SHARED.glob("*.json"))


def without_ours(content):
    return {key: value for key, value in content.items() if key != "dsframe"}


def compare(content, parse):
    """One of: both accept, both refuse, stricter (with a reason). Anything else fails."""
    examined = examine(json.dumps(content), "x.json")
    errors = [problem for problem in examined.problems if problem.severity == "error"]
    theirs = parse(without_ours(content))
    if not errors:
        assert examined.config is not None
        # "auto" is resolved by us: DeepSpeed sees the resolved file. Without "auto" it must take the file as it is.
        resolved = parse(examined.config.for_deepspeed(1))
        assert resolved is None, f"we accept, DeepSpeed raises {resolved!r} for {content}"
        if '"auto"' not in json.dumps(content):
            assert theirs is None, f"we accept, DeepSpeed raises {theirs!r} for {content}"
        return "both accept"
    if theirs is not None:
        return "both refuse"
    assert {problem.code for problem in errors} & set(STRICTER), f"no reason to refuse {content}: {errors}"
    return "stricter"


def test_public_files(parse):
    files = public()
    if not files:
        pytest.skip(f"{SHARED} is not there: the public files are not part of the repository")
    seen = {}
    for path in files:
        try:
            content = read(path.read_text()).root
        except ReadError:
            continue
        # One process: files made for more must not fail for their world size.
        for key in ("train_batch_size",):
            if isinstance(content.get("train_micro_batch_size_per_gpu"), int) and isinstance(content.get(key), int):
                del content[key]
        verdict = compare(content, parse)
        seen[verdict] = seen.get(verdict, 0) + 1
    assert seen["both accept"] >= 70
    print(seen)

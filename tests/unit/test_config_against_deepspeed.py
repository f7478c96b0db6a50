"""Our verdict beside that of DeepSpeed's own parser, and our schema beside DeepSpeed's own models."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsframe.config.load import examine
from dsframe.config.read.reader import ReadError, read
from dsframe.config.schema.base import Section, Unmodelled
from dsframe.config.schema.file import File, section_at, shape
from dsframe.errors import EngineError

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
def parse() -> Any:
    """DeepSpeed's parser: the exception it raises for a dictionary, or None."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("DS_ACCELERATOR", "cpu")
        import deepspeed  # noqa: F401
        from deepspeed.runtime.config import DeepSpeedConfig

    def parser(content: Any) -> BaseException | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                DeepSpeedConfig(copy.deepcopy(content))
        except Exception as error:
            return error
        return None

    return parser


def public() -> list[Path]:
    return sorted(SHARED.glob("*.json"))


def without_ours(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != "dsframe"}


def compare(content: dict[str, Any], parse: Any) -> str:
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


def test_public_files(parse: Any) -> None:
    files = public()
    if not files:
        pytest.skip(f"{SHARED} is not there: the public files are not part of the repository")
    seen: dict[str, int] = {}
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


EXCLUDED = {"dsframe", "stages", "autotp_size", "sequence_parallel_size"}
"""Ours, and what needs several processes."""

VALUES: list[Any] = [
    0, 1, 2, 3, 4, 8, -1, 0.5, 1.0, 2.5, 5e8, 1e12, True, False, None, "auto", "2", "0.5", "true", "off", "foo", "", [], [1],
    ["a"], {}, {"enabled": True}, "cpu", "nvme", "fp16", "bf16", "mean", "sum", "5e8", "WARN",
]  # fmt: skip


def sections(
    owner: type[Section] = File, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    yield path, owner
    for key in owner.model_fields:
        section = section_at(owner, key, {})
        if section and (*path, key) != ("dsframe",):
            yield from sections(section, (*path, key))


def fitting(owner: type[Section], key: str) -> list[Any]:
    """Values of the right type for a key, most of them in range."""
    expected = shape(owner, key)
    values: list[Any] = [value for value in expected.literals if value is not None]
    kinds = {
        "bool": [True, False],
        "int": [1, 2, 8, 1000],
        "float": [0.1, 0.5, 1.0],
        "str": ["foo"],
        "dict": [{}],
        "list": [[]],
    }
    return [*values, *(value for kind, some in kinds.items() if kind in expected.kinds for value in some)] or VALUES


def variants(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Configurations with one to four keys of the schema set to values that may be right or wrong."""
    rng = random.Random(seed)
    places = [
        (path, key, owner)
        for path, owner in sections()
        for key in owner.model_fields
        # What is inside a section that no training here uses is for DeepSpeed to judge.
        if key not in EXCLUDED
        and not any(issubclass(part or File, Unmodelled) for part in (owner, shape(owner, key).section))
    ]
    bases: list[dict[str, Any]] = [
        {"train_batch_size": 8},
        {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}},
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
        {"train_batch_size": 4, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    ]
    for _ in range(count):
        content = copy.deepcopy(rng.choice(bases))
        for _ in range(rng.randint(1, 4)):
            path, key, owner = rng.choice(places)
            value = rng.choice(fitting(owner, key) if rng.random() < 0.6 else VALUES)
            target: Any = content
            for part in path:
                target = target.setdefault(part, {}) if isinstance(target, dict) else None
                if not isinstance(target, dict):
                    break
            if isinstance(target, dict):
                target[key] = copy.deepcopy(value)
        yield content


def test_generated_variants(parse: Any) -> None:
    seen: dict[str, int] = {}
    for content in variants(300, seed=19):
        verdict = compare(content, parse)
        seen[verdict] = seen.get(verdict, 0) + 1
    assert min(seen.values()) >= 20, seen
    print(seen)


def test_a_parameter_that_deepspeed_cannot_send_is_named() -> None:
    """When DeepSpeed can, our refusal goes."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    from dsframe.engines.deepspeed import engine

    model = torch.nn.ParameterDict({"logit_scale": torch.tensor(2.65)})
    with pytest.raises(RuntimeError, match=r"dim\(\) cannot be 0 to view"):
        DeepSpeedEngine._broadcast_model(SimpleNamespace(dist_backend="gloo", module=model))
    with pytest.raises(EngineError, match=r"as logit_scale is: make its shape \[1\], or choose engine \"ddp\""):
        engine.refuse_scalars(model)
    engine.refuse_scalars(torch.nn.Linear(2, 2))

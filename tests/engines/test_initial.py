"""Initial weights are the same on every engine, to the bit: drawn in memory, in files, or read from a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsframe.tasks import _transformers
from tests.engines.initial import FOLDER, LAYERED, TASKS
from tests.processes import horovodrun, python, run_ranks, warm

LAUNCHES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "torch and ZeRO": (warm, ["ddp", "fsdp", *(f"deepspeed:{stage}" for stage in range(4))]),
    "horovod": (horovodrun, ["horovod"]),
    "pipeline": (warm, ["deepspeed:pipeline"]),
}


def found(folder: Path, launch: Callable[[list[str]], Any], cases: list[str]) -> dict[str, Any]:
    command = ["-m", "tests.engines.initial", str(folder), *cases]
    run_ranks(launch(command), cwd=folder, timeout_seconds=240).check()
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("initial")
    torch.manual_seed(5)
    config = _transformers.configure("AutoModelForCausalLM", TASKS["llama"]["model"], {})
    model: Any = _transformers.build("AutoModelForCausalLM", config, None)
    model.to(torch.bfloat16).save_pretrained(place / FOLDER, max_shard_size="1MB")
    assert len(list((place / FOLDER).glob("*.safetensors"))) > 2
    return place


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    one: dict[str, Any] = found(folder, python, ["single"])["single"]
    return one


@pytest.mark.parametrize("name", LAUNCHES)
def test_initial_weights_are_those_of_one_process(name: str, folder: Path, expected: dict[str, Any]) -> None:
    launch, cases = LAUNCHES[name]
    for case, models in found(folder, lambda command: launch(2, command), cases).items():
        assert models.keys() == (set(LAYERED) if name == "pipeline" else expected.keys()), case
        for model, digests in models.items():
            assert digests == expected[model], (case, model)

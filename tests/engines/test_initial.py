"""Initial weights are the same on every engine, to the bit: drawn in memory, in files, or read from a model folder.

Those of pipelines: tests/engines/test_groups.py."""

import pytest
import torch

from dsframe.tasks import _transformers
from tests.engines.initial import FOLDER, LLAMA
from tests.processes import reported

JOBS = {
    "torch and ZeRO": ["ddp", "fsdp", *(f"deepspeed:{stage}" for stage in range(4))],
    "horovod": ["horovod"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("initial")
    torch.manual_seed(5)
    config = _transformers.configure("AutoModelForCausalLM", LLAMA, {})
    model = _transformers.build("AutoModelForCausalLM", config, None)
    model.to(torch.bfloat16).save_pretrained(place / FOLDER, max_shard_size="1MB")
    assert len(list((place / FOLDER).glob("*.safetensors"))) > 2
    return place


@pytest.fixture(scope="module")
def expected(folder):
    return reported("initial", folder, 1, ["single"])["single"]


@pytest.mark.parametrize("name", JOBS)
def test_initial_weights_are_those_of_one_process(name, folder, expected):
    for case, models in reported("initial", folder, 2, JOBS[name]).items():
        assert models.keys() == expected.keys(), case
        for model, digests in models.items():
            assert digests == expected[model], (case, model)

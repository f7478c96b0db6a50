"""Sequences cut along time among ranks: the same losses, norms and evaluation as one process. (Weights: tests/equivalence.py.)"""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsframe import tasks
from dsframe.config import load
from dsframe.engines.deepspeed.sequence import Slices
from dsframe.errors import EngineError, TaskError
from dsframe.model.micro_batch import MicroBatch
from tests import equivalence, kept
from tests.equivalence import SINGLE, Case
from tests.files import ds_config, read_rows, zero
from tests.text_files import LLAMA


def records(folder, case, file=None, section=None):
    """metrics.jsonl of four steps and an evaluation, whose last batch is not full."""
    file = {**equivalence.document("gpt", case), **(file or {})}
    file["dsframe"] |= {"steps": 4, "eval_micro_batch_size": 7, **(section or {})}
    run_dir = folder / case.engine
    file["dsframe"]["run_dir"] = str(run_dir)
    kept.train(folder, file, case.processes).check()
    return read_rows(run_dir / "metrics.jsonl")


SGD = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}
"""Which hides no factor, as clipping and AdamW do."""


def lines_of(folder, packing, key_heads):
    """A task of documents of 3 to 60 letters: one a row, padded, or as many as fit, which do not see each other."""
    numbers = random.Random(0)
    lines = ("".join(numbers.choice("abcdef gh") for _ in range(numbers.randrange(3, 60))) for _ in range(200))
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return {
        "name": "causal-language-model",
        "model": {**LLAMA, "num_key_value_heads": key_heads},
        "context": 32,
        "data": {"train": str(corpus), "eval": str(corpus), "packing": packing},
        "data_dir": str(folder / "cache"),
    }


def compared(folder, size, stage, packing, steps, bound):
    """Sequences of each row shared among ``size`` ranks, beside one process: fewer key heads than ranks."""
    task = lines_of(folder, packing, key_heads=1 if size == 2 else 2)
    cut = {"sequence_parallel_size": size, **zero(stage)}
    alone = records(folder, SINGLE, SGD, {"task": task, "steps": steps})
    case = Case("deepspeed", cut, processes=size)
    shared = records(folder, case, SGD, {"task": task, "steps": steps})
    for key in ("loss", "gradient_norm"):
        there = [record[key] for record in alone if key in record]
        assert len(set(there)) == steps
        assert [record[key] for record in shared if key in record] == pytest.approx(there, abs=bound)
    there, found = ([r["evaluation"] for r in run if "evaluation" in r] for run in (alone, shared))
    assert len(there) == len(found) > 0
    for one, two in zip(there, found, strict=True):
        assert two == pytest.approx(one, abs=1e-5)


def test_packed_documents_of_a_transformers_model(tmp_path):
    """Targets that do not count, and the stage that shares everything."""
    compared(tmp_path, 2, 3, "documents", 4, 5e-6)


def test_padded_rows_of_a_transformers_model(tmp_path):
    """Slices of which some, or all of a rank's, are padding."""
    compared(tmp_path, 2, 1, "rows", 4, 5e-6)


@pytest.fixture
def slices(monkeypatch):
    """Those of rank 3 of 4, in groups of 2."""
    monkeypatch.setattr("torch.distributed.new_subgroups", lambda size: (None, []))
    task = SimpleNamespace(share_sequences=lambda *_: None, before_slicing=lambda inputs: inputs)
    batch = load({"train_batch_size": 8, "sequence_parallel_size": 2}).batch(4)
    plan = SimpleNamespace(batch=batch, world=SimpleNamespace(rank=3), task=task)
    return Slices(plan, nn.Identity())


def test_a_rank_takes_its_slice_of_everything(slices):
    tokens = torch.arange(12).view(2, 6)
    inputs, targets = slices.cut(({"tokens": tokens, "options": "kept"}, tokens[..., None]))
    assert inputs["tokens"].tolist() == [[3, 4, 5], [9, 10, 11]]
    assert inputs["options"] == "kept"
    assert targets.shape == (2, 3, 1)
    weighted = slices.cut_micro_batch(MicroBatch(tokens, tokens, 2.0))
    assert weighted.weight == 2.0
    assert weighted.targets.tolist() == [[3, 4, 5], [9, 10, 11]]


@pytest.mark.parametrize("shape", [(4,), (4, 5)])
def test_what_has_no_equal_slices_is_refused(slices, shape):
    with pytest.raises(EngineError, match="2 ranks cannot slice a tensor of shape"):
        slices.cut((torch.zeros(4, 6), torch.zeros(shape)))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "language", "heads": 3, "width": 12}, "heads 3 is not divisible by sequence_parallel_size 2"),
        ({"name": "language", "context": 31}, "context 31 is not divisible by sequence_parallel_size 2"),
        ({"name": "vision"}, r"VisionTask has no share_sequences\(\)"),
    ],
)
def test_models_that_cannot(section, message):
    """What the check says of a file, the task says to a program."""
    task = tasks.build(load(ds_config(8, task=section)).settings.task, 1)
    with pytest.raises(TaskError, match=message):
        task.share_sequences(nn.Identity(), 0, 2, lambda attention: attention)

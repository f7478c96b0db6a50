"""Keys of other trainers in a file get the key that does it here, in one error."""

import json

import pytest

from dsframe.config.load import examine
from dsframe.config.read import foreign
from dsframe.config.read.reader import keys

FILE = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}},
    "zero_optimization": {},
}
VALUES = {
    "dataloader_drop_last": True,
    "dsframe.deterministic": True,
    "dsframe.eval_before_training": True,
    "dsframe.fsdp.wrap": ["Block"],
    "dsframe.model.activation_checkpointing": True,
    "dsframe.model.compile": True,
    "dsframe.model.sync_batch_norm": True,
    "dsframe.run_dir": "out",
    "dsframe.tf32": True,
    "dsframe.adapter.lora_dropout": 0.1,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_optimizer.nvme_path": "/nvme",
    "zero_optimization.offload_param.nvme_path": "/nvme",
}
"""A value of each key that takes no number."""
WHERE = ("", "dsframe")


def errors(document):
    return [problem for problem in examine(json.dumps(document), "f.json").problems if problem.severity == "error"]


def with_key(where, name, value):
    document = json.loads(json.dumps({**FILE, "dsframe": {"engine": "deepspeed"}}))
    (document[where] if where else document)[name] = value
    return document


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", sorted(foreign.table()["keys"]))
def test_a_key_with_the_same_value_is_named_and_taken(name, where):
    target = foreign.target(name)
    value = VALUES.get(target, 2)
    document = with_key(where, name, value)
    if target == f"{where}.{name}".lstrip(".") or target in document:
        return
    found = [problem for problem in errors(document) if name in problem.path.split(".")]
    assert len(found) == 1, found
    assert found[0].code in ("unknown-key", "misplaced-key")
    assert keys(target)[-1] in found[0].message + found[0].remedy or found[0].code == "misplaced-key"
    section = document
    for part in keys(target)[:-1]:
        section = section.setdefault(str(part), {})
    (document[where] if where else document).pop(name)
    section[str(keys(target)[-1])] = value
    assert not [problem for problem in errors(document) if problem.code in ("unknown-key", "misplaced-key", "type")]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", sorted({*foreign.table()["words"], *foreign.table()["nothing to do"]}))
def test_a_key_of_another_form_gets_one_error_with_what_to_write(name, where):
    if (where, name) in (("dsframe", "model"), ("dsframe", "optimizers"), ("", "log_level")):
        return  # keys of the section
    found = [problem for problem in errors(with_key(where, name, "x")) if name in problem.path.split(".")]
    assert len(found) == 1, found
    assert found[0].remedy.startswith(("write ", "tell ", "run ", "put ", "remove it: ")), found[0]


def test_what_is_assumed_is_checked_and_no_second_error():
    document = {**FILE, "dsframe": {"num_train_epochs": 3, "precision": "bf16", "gradient_checkpointing": True}}
    assert [problem.path.rpartition(".")[2] for problem in errors(document)] == [
        "num_train_epochs", "precision", "gradient_checkpointing"
    ]  # fmt: skip

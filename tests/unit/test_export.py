"""An export holds one file's worth of the weights; a disk that fills is one error, and leaves nothing that looks whole."""

import re
import resource
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import dsframe
from dsframe.checkpoint import store
from dsframe.config import load
from dsframe.errors import CheckpointError, DsframeError
from dsframe.model.spill import is_disk
from dsframe.tasks import build
from dsframe.tools import export
from tests.files import ds_config
from tests.processes import python, run_ranks
from tests.unit.test_trainer import Line, file

FORMATS = ("safetensors", "torch", "huggingface")
LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
MOST_MIB = 20
"""Anonymous memory that an export may take: the weights are 42 MiB in bf16."""


def anonymous():
    """MiB of this process that lie in no file."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def growth(checkpoint, to, out):
    """MiB at the fullest moment of an export, above what there was before."""
    before, highest, ended = anonymous(), 0.0, threading.Event()

    def look():
        nonlocal highest
        while not ended.wait(0.002):
            highest = max(highest, anonymous())

    watch = threading.Thread(target=look)
    watch.start()
    try:
        export.export(checkpoint, to, "bfloat16", out, shard_size="5MB", say=lambda line: None)
    finally:
        ended.set()
        watch.join()
    return highest - before


def main(folder):
    (checkpoint,) = store.locate(folder / "run")
    for to in FORMATS:
        growth(checkpoint, to, folder / f"warm-{to}")  # what is imported stays
        print(f"{to}: {growth(checkpoint, to, folder / to):.1f} MiB")
    before = sorted(folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))  # as a disk that fills
    for to in FORMATS:
        try:
            growth(checkpoint, to, folder / "full")
        except DsframeError as error:
            print(f"{to} full: {error}")
        assert sorted(folder.iterdir()) == before, to


def test_memory_and_a_full_disk(here, monkeypatch):
    if not is_disk(here):
        pytest.skip("the temporary folder lies in memory")
    section = {"name": "causal-language-model", "model": LLAMA, "context": 16, "corpus": "synthetic", "samples": 4}
    file = ds_config(1, "AdamW", 1e-3, engine="single", steps=1, task=section, run_dir="run")
    monkeypatch.setenv("DSFRAME_DATA", "cache")
    task = build(load(file).settings.task, seed=0)
    monkeypatch.setattr(type(task), "eval_data", lambda self: None)
    dsframe.fit(task, file)
    told = run_ranks(python(["-m", "tests.unit.test_export", str(here)]), cwd=here, timeout_seconds=120).check()
    took = dict(re.findall(r"^(\w+): (-?[\d.]+) MiB", told.stdout, re.MULTILINE))
    assert took.keys() == set(FORMATS)
    assert all(float(size) < MOST_MIB for size in took.values()), took
    full = re.findall(r"^\w+ full: (.*)$", told.stdout, re.MULTILINE)
    assert len(full) == len(FORMATS), told.stdout
    assert all("cannot be written" in error or "no room" in error for error in full), full


if __name__ == "__main__":
    main(Path(sys.argv[1]))


class Tied(Line):
    def model(self):
        first, second = nn.Linear(1, 1), nn.Linear(1, 1)
        second.weight = first.weight
        return nn.Sequential(first, second)


def test_tied_weights_are_one_tensor_and_what_was_written_is_read_again(tmp_path, monkeypatch):
    dsframe.fit(Tied(), file(tmp_path, steps=1))
    (checkpoint,) = store.locate(tmp_path)
    weights = export.read(checkpoint)
    assert weights["1.weight"] is weights["0.weight"]

    def damaged(_, to, dtype, out, tensors, *rest):
        torch.save({name: tensor + 1 for name, tensor in tensors.items()}, out)

    monkeypatch.setattr(export, "_write", damaged)
    with pytest.raises(CheckpointError, match="has another 0"):
        export.export(checkpoint, "torch")
    assert list(checkpoint.parent.glob("*.pt")) == []

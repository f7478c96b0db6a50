"""The page on data: its programs run, its files train."""

import json
import re

from dsframe.config import load
from dsframe.run import execute
from tests.processes import REPOSITORY
from tests.text_files import LLAMA, jsonl, sentence, tokenizer

PAGE = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")


def blocks(kind):
    found = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found


def test_its_programs_run_and_its_files_train(here, monkeypatch):
    import random

    import pyarrow as arrow
    import torch
    from pyarrow import parquet
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("DSFRAME_DATA", "cache")
    names = {"__name__": "data"}
    for block in blocks("python"):
        exec(compile(block, "docs/data.md", "exec"), names)
    assert names["summary"].steps == 5
    for folder in ("texts", "books"):
        (here / folder).mkdir()
    rows = [{"text": sentence(random.Random(number))} for number in range(30)]
    jsonl(here / "texts" / "a.jsonl", rows)
    jsonl(here / "held_out.jsonl", rows)
    parquet.write_table(arrow.Table.from_pylist(rows), here / "more.parquet")
    (here / "books" / "a.txt").write_text("a book")
    torch.manual_seed(0)
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    LlamaForCausalLM(LlamaConfig(**settings, vocab_size=400)).save_pretrained("llama")
    tokenizer(here / "llama")
    short = ["dsframe.engine=single", "dsframe.steps=2", "train_batch_size=2"]
    for number, block in enumerate(blocks("json")):
        config = load(json.loads(block), overrides=[*short, f"dsframe.run_dir=run{number}"])
        assert config.problems == ()
        assert execute(config, quiet=True).steps == 2

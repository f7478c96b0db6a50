"""The page on data: its programs run, its files train."""

import json

from dsframe.config import load
from dsframe.run import execute
from tests.processes import REPOSITORY
from tests.text_files import LLAMA, jsonl, sentence, tokenizer
from tests.unit.test_site import texts

PAGE = REPOSITORY / "docs" / "data.md"


def test_its_programs_run_and_its_files_train(here, monkeypatch):
    import random

    import pyarrow as arrow
    import torch
    from pyarrow import parquet
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("DSFRAME_DATA", "cache")
    names = {"__name__": "data"}
    for text in texts(PAGE, "python"):
        exec(compile(text, "docs/data.md", "exec"), names)
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
    for number, text in enumerate(texts(PAGE, "json")):
        config = load(json.loads(text), overrides=[*short, f"dsframe.run_dir=run{number}"])
        assert config.problems == ()
        assert execute(config, quiet=True).steps == 2

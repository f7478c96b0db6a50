"""dsframe generate: greedy text of a GPT and of a Llama is what the model's own logits say; drawn text repeats with its seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dsframe
from dsframe import tasks
from dsframe.errors import TaskError
from dsframe.inference import load_model
from dsframe.run import execute
from dsframe.tools import generate
from tests import text_files

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TEXT = {"context": 32, "corpus": "synthetic", "samples": 200}
TASKS: dict[str, dict[str, Any]] = {
    "gpt": {"name": "language", "layers": 2, "heads": 4, "width": 32, **TEXT},
    "llama": {"name": "causal-language-model", "model": LLAMA, **TEXT},
}


@pytest.mark.parametrize("kind", TASKS)
def test_text_of_a_checkpoint(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"engine": "single", "steps": 20, "run_dir": str(tmp_path / "run"), "task": TASKS[kind]}
    file = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "dsframe": settings}
    execute(dsframe.load(file), quiet=True)
    capsys.readouterr()

    def text(*more: str) -> str:
        assert generate.main([str(tmp_path / "run"), "--prompt", "ab", "--tokens", "12", *more]) == 0
        return capsys.readouterr().out.rstrip("\n")

    model, tokens = load_model(tmp_path / "run"), torch.tensor([list(b"ab")])
    with torch.no_grad():
        for _ in range(12):
            outputs = model(tokens)
            logits = outputs.logits if kind == "llama" else outputs
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert text() == bytes(tokens[0].tolist()).decode(errors="replace").rstrip("\n")
    drawn = text("--sample", "--temperature", "2.0", "--seed", "1")
    assert drawn == text("--sample", "--temperature", "2.0", "--seed", "1")
    assert drawn != text("--sample", "--temperature", "2.0", "--seed", "2")
    assert text("--sample", "--top-k", "1") == text()


def test_other_tasks_make_no_text(tmp_path: Path) -> None:
    task = {"name": "vision", "dataset": "synthetic", "image_size": 8, "classes": 2, "samples": 16}
    settings = {"engine": "single", "steps": 1, "run_dir": str(tmp_path / "run"), "task": task}
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    execute(dsframe.load({"train_batch_size": 8, "optimizer": optimizer, "dsframe": settings}), quiet=True)
    with pytest.raises(TaskError, match="is of the task vision, which makes no text"):
        generate.main([str(tmp_path / "run"), "--prompt", "a"])


def test_text_ends_where_the_tokenizer_of_the_training_does(tmp_path: Path) -> None:
    """The model folder's own end is an ordinary word of a tokenizer from elsewhere."""
    folder = text_files.tokenizer(tmp_path / "tokenizer")
    settings = {**LLAMA, "vocab_size": 400, "max_position_embeddings": 32, "eos_token_id": 7}
    settings.pop("model_type")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).save_pretrained(tmp_path / "model")
    task = {"name": "causal-language-model", "model": str(tmp_path / "model"), "tokenizer": str(folder), **TEXT}
    config = dsframe.load({"train_batch_size": 8, "dsframe": {"engine": "single", "steps": 1, "task": task}})
    built = tasks.build(config.settings.task, 0)
    model: Any = built.model().eval()
    model.lm_head.weight.data.zero_()
    model.lm_head.weight.data[7] = model.model(torch.tensor([[5]])).last_hidden_state[0, -1].detach() * 100
    options = generate.parser().parse_args(["x", "--prompt", "a", "--tokens", "4"])
    assert generate.generated(built, model, [5], options)[:2] == [7, 7]
    assert built.tokenizer.eos_token_id != 7

"""Recipes of examples/recipes, on small models of their kinds with random weights: what is learned, and an export that loads."""

import numpy as np
import pytest
import torch

from dsframe.config import load
from dsframe.config.read.reader import read
from dsframe.data.documents import Row
from dsframe.data.encoders import ConversationEncoder
from dsframe.run import execute
from dsframe.run_dir.record import read_metrics
from dsframe.tasks import _transformers
from dsframe.tools.export import main as export
from tests.processes import REPOSITORY
from tests.text_files import jsonl
from tests.unit.test_conversations import byte_words

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

RECIPES = REPOSITORY / "examples" / "recipes"
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 4096,
}  # fmt: skip
MODELS = {"llama3": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text", "mistral": "mistral"}
ENDS = {"llama3": "<|eot_id|>", "qwen3": "<|im_end|>", "gemma3": "<end_of_turn>", "mistral": "</s>"}
MARKS = ["<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<start_of_turn>", "[INST]", "[/INST]"]
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5 🐈"},
    {"role": "user", "content": "And 1 + 1?"},
    {"role": "assistant", "content": "It is 2"},
]


def words(kind):
    return byte_words([ENDS[kind], *MARKS], bos_token="<bos>", eos_token=ENDS[kind])


def written(kind, folder):
    """The recipe, for a small model of its kind on a CPU."""
    tokenizer = words(kind)
    tokenizer.save_pretrained(folder / "model")
    config = transformers.AutoConfig.for_model(MODELS[kind], **SIZES, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    jsonl(folder / "chats.jsonl", [{"messages": TALK}] * 32)
    file = read((RECIPES / f"{kind}.json").read_text()).root
    file |= {"train_batch_size": 4, "bf16": {"enabled": False}, "dsframe": {**file["dsframe"], "engine": "single"}}
    file["optimizer"]["params"]["lr"] = 0.01
    section = file["dsframe"]["task"]
    section |= {"model": str(folder / "model"), "data_dir": str(folder), "context": 256}
    section["data"] |= {"train": str(folder / "chats.jsonl"), "chat_template": str(RECIPES / f"{kind}.jinja")}
    file["dsframe"] |= {"epochs": None, "steps": 6, "run_dir": str(folder / "run"), "log_every_steps": 1}
    return file


@pytest.mark.parametrize("kind", MODELS)
def test_a_language_model_learns_its_answers_and_loads(kind, here):
    template = (RECIPES / f"{kind}.jinja").read_text()
    tokenizer = words(kind)
    (tokens,) = ConversationEncoder(tokenizer, template).encode([Row("a:1", {"messages": TALK})])
    text = tokenizer.decode(tokens[tokens >= 0].tolist(), skip_special_tokens=False)
    assert [part.strip() for part in text.split(ENDS[kind])] == ["It is 5 🐈", "It is 2", ""]
    whole = tokenizer.decode(np.maximum(tokens, ~tokens).tolist())
    asked = tokenizer.apply_chat_template(TALK[:2], chat_template=template, add_generation_prompt=True, tokenize=False)
    assert whole.startswith(asked), "what generates sees what was trained"
    execute(load(written(kind, here)), quiet=True)
    losses = [line["loss"] for line in read_metrics(here / "run") if "loss" in line]
    assert losses[-1] < losses[0]
    assert export(["run", "--to", "huggingface", "--merge", "--out", "out"]) == 0
    assert transformers.AutoTokenizer.from_pretrained(here / "out").chat_template == template
    assert type(_transformers.load(here / "out")).__name__.lower().startswith(MODELS[kind].split("_")[0])

"""Writes a small model with random weights and some conversations, so that the example runs before you have your own."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Writes the folder ``model`` and ``chats.jsonl``, rows of a prompt and a completion. Tokens are bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, num_key_value_heads=2, **sizes)).save_pretrained("model")
    pairs = [(left, right) for left in range(10) for right in range(10)]
    rows = [{"prompt": f"What is {left} + {right}? ", "completion": str(left + right)} for left, right in pairs]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()

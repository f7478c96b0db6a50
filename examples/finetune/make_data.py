"""Writes a small model with random weights and some conversations, so that the example runs before you have your own."""

import json
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""How messages become text; what is to be learned stands between the marks of a generation."""


def main() -> None:
    """Writes the folder ``model``, with a tokenizer whose tokens are characters, and ``chats.jsonl``, sums as conversations."""
    torch.manual_seed(0)
    characters = ["</s>", *string.printable]
    made = Tokenizer(models.WordLevel({token: number for number, token in enumerate(characters)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    made.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("model")
    rows = []
    for left in range(10):
        for right in range(10):
            question = {"role": "user", "content": f"What is {left} + {right}? "}
            rows.append({"messages": [question, {"role": "assistant", "content": str(left + right)}]})
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()

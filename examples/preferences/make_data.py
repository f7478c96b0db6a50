"""Writes a small model with random weights and pairs of answers, so that the example runs before you have your own."""

import json
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def main() -> None:
    """Writes the folder ``model``, whose tokens are characters, and pairs in ``train.jsonl`` and ``eval.jsonl``."""
    torch.manual_seed(0)
    characters = ["</s>", *string.printable]
    made = Tokenizer(models.WordLevel({token: number for number, token in enumerate(characters)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    made.decoder = decoders.Fuse()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="</s>").save_pretrained("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(characters), **sizes)).save_pretrained("model")
    rows = [
        {"prompt": f"{left} + {right} = ", "chosen": f"{left + right}, I think.", "rejected": f"{left + right}!!!"}
        for left in range(10)
        for right in range(10)
    ]
    for name, part in (("train", rows[::2]), ("eval", rows[1::2])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


if __name__ == "__main__":
    main()

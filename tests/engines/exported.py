"""A task for tests/engines/test_exports.py, and a program without dsframe that loads exports as their users do."""

import os
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from tests.files import write_json

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = {**SIZES, "vocab_size": 48, "max_position_embeddings": 16, "initializer_range": 0.3, "pad_token_id": 0}
PICTURES = {**SIZES, "image_size": 16, "patch_size": 8, "num_labels": 3, "initializer_range": 0.3}
TIED, CLASSES = {**WORDS, "tie_word_embeddings": True}, {**WORDS, "num_labels": 3}
LM, SEQUENCES = "LlamaForCausalLM", "LlamaForSequenceClassification"
KINDS = {
    "tied": (LM, TIED, None),
    "untied": (LM, {**WORDS, "tie_word_embeddings": False}, None),
    "adapter": (LM, TIED, {"r": 2, "target_modules": ["q_proj", "embed_tokens"]}),
    "classifier": (SEQUENCES, CLASSES, None),
    "adapter-classifier": (SEQUENCES, CLASSES, {"r": 2}),
    "vision": ("ViTForImageClassification", PICTURES, None),
}
"""Class of transformers, its configuration, and the file's adapter."""


def base(kind):
    """The model that the training begins with, of the folder ``base``."""
    import transformers

    return getattr(transformers, KINDS[kind][0]).from_pretrained("base")


def rows(kind):
    """Name and values of the inputs, and the targets."""
    numbers = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 48, (12, 9), generator=numbers)
    if kind == "vision":
        return "pixel_values", torch.randn(12, 3, 16, 16, generator=numbers), tokens[:, 0] % 3
    return "input_ids", tokens[:, :8], tokens[:, 1:] if KINDS[kind][0] == LM else tokens[:, 0] % 3


def loss_of(logits, targets):
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def loss(model, kind):
    name, inputs, targets = rows(kind)
    return float(loss_of(model.eval()(**{name: inputs}).logits, targets))


def read(kind, path):
    """What is at ``path``, by the library that its name stands for."""
    import transformers

    if path.name == "huggingface":
        auto = {LM: "AutoModelForCausalLM", SEQUENCES: "AutoModelForSequenceClassification"}
        return getattr(transformers, auto.get(KINDS[kind][0], "AutoModelForImageClassification")).from_pretrained(path)
    if path.name == "peft":
        import peft

        return peft.PeftModel.from_pretrained(base(kind), str(path))
    from safetensors.torch import load_file

    weights = load_file(path) if path.name == "safetensors" else torch.load(path)
    name, config, _ = KINDS[kind]
    # A merged embedding is no longer the head's.
    ties = torch.equal(
        weights.get("lm_head.weight", torch.ones(1)), weights.get("model.embed_tokens.weight", torch.ones(1))
    )
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**{**config, **({"tie_word_embeddings": ties} if name == LM else {})}))
    model.load_state_dict(weights)
    return model


def main(kind):
    found = {path.name: loss(read(kind, path), kind) for path in sorted(Path("out").iterdir())}
    assert "dsframe.checkpoint" not in sys.modules
    write_json(Path("found.json"), found)
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads at times abort a regular exit


if __name__ == "__main__":
    main(sys.argv[1])

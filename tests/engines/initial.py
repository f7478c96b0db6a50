"""Initial weights of several models, on one engine after another, in one process group.

    torchrun --nproc-per-node 2 -m tests.engines.initial FOLDER CASE ...        a case: ENGINE[:STAGE]

leaves a digest of each parameter and buffer in FOLDER/CASE.json. tests/engines/test_initial.py compares them.
"""

import hashlib
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsframe
from tests.engines import several
from tests.engines.several import prepare
from tests.files import ds_config

WORDS, WIDTH = 1200, 256


class Own(nn.Module):
    """What users write: ``apply``, a parent that fills a child's weight again, tied weights, buffers, a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("positions", torch.randn(8, WIDTH))
        self.apply(self._init)
        nn.init.orthogonal_(self.body[0].weight)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def _init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)

    def forward(self, words):
        hidden = self.embedding(words) + self.positions
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(self.body(hidden) * self.scale)


class OwnTask(dsframe.Task):
    def model(self):
        return Own()

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def train_data(self):
        words = torch.randint(0, WORDS, (8, 8), generator=torch.Generator().manual_seed(1))
        return TensorDataset(words, words)


LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
}
FOLDER = "llama-folder"
"""The Llama as a folder in FOLDER, in bf16, in several files."""


def file(case, task, short):
    engine, _, how = case.partition(":")
    found = ds_config(4, "AdamW", 1e-3, engine=engine, task=task, seed=7)
    if how:
        found["zero_optimization"] = {"stage": int(how)}
    return found | ({"bf16": {"enabled": True}} if short else {})


def digests(case, task, short):
    """Each parameter's and buffer's, as ``engine.state`` has them before the first step."""
    make, _ = prepare(file(case, task, short), case.partition(":")[0])
    moved = []

    def seen(module, *arguments, **options):
        moved.append(sum(parameter.numel() for parameter in module.parameters()))
        return to(module, *arguments, **options)

    to = nn.Module.to
    with mock.patch.object(nn.Module, "to", seen):
        engine = make()
    try:
        state = engine.state()
        found = {one.name: digest(one.weight) for one in state.parameters}
        found |= {f"buffer {name}": digest(buffer) for name, buffer in state.buffers.items()}
        if case == "deepspeed:3":  # on a GPU, what is moved at once is on the device at once
            assert max(moved) == 0, f"{max(moved)} elements were moved to the device at once"
    finally:
        engine.close()
    return found


def digest(tensor):
    tensor = tensor.detach().cpu().contiguous()
    content = tensor.flatten().view(torch.uint8).numpy().tobytes()
    return f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(content).hexdigest()[:16]}"


def each_model(case):
    own = {"name": "tests.engines.initial:OwnTask"}
    text = {"context": 16, "corpus": "synthetic", "samples": 8}
    llama = {"name": "causal-language-model", "model": str(Path(FOLDER).resolve()), **text}
    return {
        f"{name}{' in bf16' if short else ''}": digests(case, task, short)
        for name, task in (("own", own), ("llama", llama))
        for short in (False, True)
    }


if __name__ == "__main__":
    several.report(each_model, [])

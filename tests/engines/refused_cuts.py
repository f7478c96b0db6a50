"""What test_tensor.py runs on two ranks: programs that layers cut among them, or experts, would train in another way.

    torchrun --nproc-per-node=2 -m tests.engines.refused_cuts REPORT.json

Each case: two steps; the report has their losses, or what was refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

import dsframe
from dsframe.engines.deepspeed.imports import groups
from dsframe.errors import EngineError
from dsframe.model.micro_batch import MicroBatch
from dsframe.tasks import _transformers
from tests.engines import several
from tests.engines.foreign_tasks import Rows
from tests.engines.several import prepare
from tests.files import ds_config
from tests.text_files import LLAMA


class Perceptron(nn.Module):
    def __init__(self, hidden=16, layer=nn.Linear):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 3)
        self.block = nn.ModuleDict({"up": layer(12, hidden), "down": nn.Linear(hidden, 12)})

    def between(self, hidden):
        return torch.tanh(hidden)

    def forward(self, rows):
        hidden = self.first(rows)
        inside = self.block["down"](self.between(self.block["up"](hidden)))
        return self.last(self.norm(hidden + inside))


class Plain(Rows):
    def model(self):
        self.net = Perceptron()
        return self.net


class Hooked(Plain):
    def model(self):
        net = super().model()
        net.block["up"].register_forward_hook(lambda module, rows, output: output * 2)
        return net


class Doubled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Subclass(Rows):
    def model(self):
        return Perceptron(layer=Doubled)


class Twice(Plain):
    def model(self):
        net = super().model()
        net.again = net.block["up"]
        return net


class SharedWeight(Plain):
    def model(self):
        net = super().model()
        net.block["gate"] = nn.Linear(12, 16)
        net.block["gate"].weight = net.block["up"].weight
        return net


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.d_model, self.up, self.down = 12, nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, rows):
        hidden = self.down(torch.tanh(self.up(rows)))
        return hidden / self.d_model


class Divided(Rows):
    def model(self):
        return nn.Sequential(nn.Linear(8, 12), Scaling(), nn.Linear(12, 3))


class Gain(Perceptron):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def between(self, hidden):
        return torch.tanh(hidden * self.gain)


class Between(Rows):
    def model(self):
        return Gain()


class Penalty(Plain):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets) + 1e-4 * sum(w.square().sum() for w in self.net.parameters())


class Gathered(Plain):
    def loss(self, outputs, targets):
        with dsframe.gathered(self.net) as net:
            return F.cross_entropy(outputs, targets) + 1e-4 * sum(w.square().sum() for w in net.parameters())


class Hidden(Rows):
    def model(self):
        task = self

        class Kept(Perceptron):
            def between(self, hidden):
                task.kept = super().between(hidden)
                return task.kept

        return Kept()

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets) + self.kept.square().mean()


class ScaledGradient(Plain):
    def model(self):
        net = super().model()
        net.block["up"].weight.register_hook(lambda gradient: gradient * 0.5)
        return net


class LargeGain(Gain):
    """More weights than the trial copies."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1 << 20, 17).requires_grad_(False)


class LargeBetween(Rows):
    def model(self):
        return LargeGain()


class Mixture(Rows):
    def model(self):
        settings = {**LLAMA, "num_hidden_layers": 1, "num_local_experts": 4, "model_type": "mixtral"}
        config = _transformers.configure("AutoModelForCausalLM", settings, {"vocab_size": 20})
        self.net = _transformers.build("AutoModelForCausalLM", config, None)
        return self.net

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs.logits[:, -1], targets)

    def train_data(self):
        draw = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randint(0, 20, (48, 4), generator=draw), torch.randint(0, 3, (48,), generator=draw))


class HookedMixture(Mixture):
    def model(self):
        net = super().model()
        net.model.layers[0].mlp.register_forward_hook(lambda module, rows, output: output * 2)
        return net


class FrozenMixture(Mixture):
    def model(self):
        net = super().model()
        net.model.layers[0].mlp.experts.requires_grad_(False)
        return net


class PenaltyMixture(Mixture):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) + 1e-4 * sum(w.square().sum() for w in self.net.parameters())


CASES = {
    "Mixture": "",
    "HookedMixture": "puts a layer without its hooks in the place of model.layers.0.mlp;",
    "FrozenMixture": "all experts are frozen",
    "PenaltyMixture": "experts.w1 outside of its module's forward pass",
    "Plain": "",
    "Hooked": "puts a layer without its hooks in the place of block.up",
    "Subclass": "puts a layer without its class, Doubled, in the place of block.up",
    "Twice": "again is used at several places of the model",
    "SharedWeight": "in which layers may share a weight",
    "Divided": "a sharded Sequential computes other outputs than the whole one",
    "Between": "gain of a sharded Gain gets another gradient than of the whole one",
    "Penalty": "uses block.up.weight outside of its module's forward pass",
    "Gathered": "dsframe.gathered: no rank gathers whole weights",
    "Hidden": "the ranks that share layers compute different losses",
    "ScaledGradient": "block.up.weight has a hook on the whole one",
    "LargeBetween": "gain, which each rank has whole, gets another gradient on each",
}
"""Task -> what is said."""
SPECS = [
    {"patterns": [r".*(up|gate)\.(weight|bias)$"], "partition_type": "column"},
    {"patterns": [r".*down\.weight$"], "partition_type": "row"},
]
TENSOR: dict[str, Any]
TENSOR = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": SPECS, "use_default_specs": False}}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def trained(case):
    """Empty, or what was refused."""
    sections = {"zero_optimization": {"stage": 1}, **(EXPERTS if case.endswith("Mixture") else TENSOR)}
    task = {"name": f"tests.engines.refused_cuts:{case}"}
    file = ds_config(16, "AdamW", 0.1, sections=sections, engine="deepspeed", task=task)
    try:
        make, loader = prepare(file, "deepspeed")
        engine = make()
        assert engine.built.watch is not None
        for step in range(2):
            engine.built.watch.begin(step + 1)
            engine.train_step(MicroBatch.of(loader.micro_batches(step)))
            engine.built.watch.end(step + 1)
    except EngineError as error:
        return str(error)
    finally:
        groups._release_process_group_references()
    return ""


if __name__ == "__main__":
    several.report(trained, CASES)
